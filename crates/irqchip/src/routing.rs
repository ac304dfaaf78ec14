//! From a GSI to where it goes: pins of the PIC and the I/O APIC, or an MSI. KVM API §4.52.
//!
//! A table is built once from what user space gives, checked as KVM checks it, and then only read.
//! Entries of one GSI lie side by side, so that a look-up is two loads and a slice.

use alloc::vec::Vec;

use host::GuestIndex;

use crate::ioapic;
use crate::message::DestRules;
use crate::msi::Msi;

/// Largest GSI plus one, and the most entries a table may have (KVM_MAX_IRQ_ROUTES).
pub const MAX_ROUTES: usize = 4096;

/// An in-kernel interrupt controller, in the numbering of the KVM API.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chip {
    /// The master 8259A: KVM_IRQCHIP_PIC_MASTER.
    PicMaster = 0,
    /// The slave 8259A: KVM_IRQCHIP_PIC_SLAVE.
    PicSlave = 1,
    /// The I/O APIC: KVM_IRQCHIP_IOAPIC.
    IoApic = 2,
}

impl Chip {
    /// From the number in `kvm_irq_routing_irqchip` or `kvm_irqchip`.
    pub const fn from_id(id: u32) -> Option<Self> {
        Some(match id {
            0 => Self::PicMaster,
            1 => Self::PicSlave,
            2 => Self::IoApic,
            _ => return None,
        })
    }

    const fn pins(self) -> u32 {
        match self {
            Self::PicMaster | Self::PicSlave => 8,
            Self::IoApic => ioapic::PINS as u32,
        }
    }
}

/// Where one entry of a GSI goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// An input pin of a controller.
    Pin {
        /// The controller that the pin is of.
        chip: Chip,
        /// The controller's pin: 0 to 7 of a PIC, 0 to 23 of the I/O APIC.
        pin: u32,
    },
    /// A message to local APICs.
    Msi(Msi),
}

/// One entry as user space gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// Global system interrupt.
    pub gsi: u32,
    /// Where it goes.
    pub target: Target,
}

/// The routes of a VM that never set any.
static STANDARD: [Route; ioapic::PINS + 16] = {
    // A filler: each place is written below.
    const NONE: Target = Target::Pin { chip: Chip::IoApic, pin: 0 };
    let mut routes = [Route { gsi: 0, target: NONE }; ioapic::PINS + 16];
    let mut pin = 0;
    while pin < ioapic::PINS {
        let gsi = pin as u32;
        routes[pin] = Route { gsi, target: Target::Pin { chip: Chip::IoApic, pin: gsi } };
        pin += 1;
    }
    let mut line = 0;
    while line < 16 {
        let gsi = line as u32;
        let chip = if gsi < 8 { Chip::PicMaster } else { Chip::PicSlave };
        routes[ioapic::PINS + line] = Route { gsi, target: Target::Pin { chip, pin: gsi & 7 } };
        line += 1;
    }
    routes
};

/// Why a table was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RoutingError {
    /// An entry or their combination is not valid (EINVAL).
    Invalid,
    /// No memory (ENOMEM).
    NoMemory,
}

/// A routing table.
#[derive(Debug, Default)]
pub struct Routing {
    /// Sorted by GSI.
    targets: Vec<Target>,
    /// `starts[gsi]..starts[gsi + 1]` are the targets of that GSI.
    starts: Vec<u16>,
    /// GSI of each controller pin, -1 for none.
    gsi_of_pin: [[i16; ioapic::PINS]; 3],
}

impl Routing {
    /// An empty table.
    pub const fn empty() -> Self {
        Self { targets: Vec::new(), starts: Vec::new(), gsi_of_pin: [[-1; ioapic::PINS]; 3] }
    }

    /// Builds a table, of messages that `rules` allow.
    ///
    /// # Errors
    /// [`RoutingError::Invalid`] for too many entries, a GSI or a pin out of range, a GSI that goes
    /// twice to one controller or both to an MSI and elsewhere, or a reserved MSI address.
    pub fn new(routes: &[Route], rules: DestRules) -> Result<Self, RoutingError> {
        // Before anything is allocated: the number is user space's.
        if routes.len() > MAX_ROUTES {
            return Err(RoutingError::Invalid);
        }
        let mut table = Self::empty();
        let mut gsis = 0;
        for route in routes {
            if route.gsi as usize >= MAX_ROUTES {
                return Err(RoutingError::Invalid);
            }
            // The table ends with the last GSI in use: most VMs have a few dozen.
            gsis = gsis.max(route.gsi as usize + 1);
            match route.target {
                Target::Pin { chip, pin } if pin >= chip.pins() => {
                    return Err(RoutingError::Invalid);
                }
                Target::Msi(msi) if !msi.valid(rules) => return Err(RoutingError::Invalid),
                Target::Pin { .. } | Target::Msi(_) => {}
            }
        }
        table.starts.try_reserve_exact(gsis + 1).map_err(|_| RoutingError::NoMemory)?;
        table.targets.try_reserve_exact(routes.len()).map_err(|_| RoutingError::NoMemory)?;

        // Counting sort: how many of each, then where each GSI starts, then the entries in place.
        // Within the capacity: this does not allocate.
        table.starts.resize(gsis + 1, 0);
        for route in routes {
            let behind = GuestIndex::new(u64::from(route.gsi) + 1);
            if let Some(count) = behind.of_mut(&mut table.starts) {
                *count += 1;
            }
        }
        // At most MAX_ROUTES in all, so sixteen bits do.
        let mut sum = 0;
        // Each count was put one place behind its GSI, so that the sum before it is where the GSI
        // begins.
        for start in &mut table.starts {
            sum += *start;
            *start = sum;
        }
        let filler = Target::Msi(Msi::default());
        table.targets.resize(routes.len(), filler);
        // By GSI, how many of its entries are in place: new ones are compared with those alone.
        let mut filled = Vec::new();
        filled.try_reserve_exact(gsis).map_err(|_| RoutingError::NoMemory)?;
        filled.resize(gsis, 0u16);
        for route in routes {
            let gsi = GuestIndex::from(route.gsi);
            let (Some(start), Some(done)) = (gsi.of(&table.starts), gsi.of_mut(&mut filled)) else {
                continue;
            };
            let (start, end) = (usize::from(*start), usize::from(*start) + usize::from(*done));
            // Compared with its own GSI's entries alone: 4,096 routes would else be 8 million
            // comparisons.
            if table.targets.get(start..end).is_some_and(|t| clashes(t, &route.target)) {
                return Err(RoutingError::Invalid);
            }
            if let Some(slot) = table.targets.get_mut(end) {
                *slot = route.target;
            }
            *done += 1;
            if let Target::Pin { chip, pin } = route.target
                && let Some(pins) = table.gsi_of_pin.get_mut(chip as usize)
                && let Some(slot) = GuestIndex::from(pin).of_mut(pins)
            {
                // The last one counts, if several GSIs share the pin: as in stock KVM.
                // GSIs end below 4096: they fit.
                *slot = route.gsi as i16;
            }
        }
        Ok(table)
    }

    /// The table of a VM that never set one: GSI 0 to 15 to the PIC and the I/O APIC pin of the
    /// same number, 16 to 23 to the I/O APIC.
    ///
    /// # Errors
    /// [`RoutingError::NoMemory`].
    pub fn standard() -> Result<Self, RoutingError> {
        Self::new(&STANDARD, DestRules::default())
    }

    /// Where a GSI goes; empty when nowhere.
    #[inline]
    pub fn targets(&self, gsi: u32) -> &[Target] {
        // One start more than GSIs. An empty table has none at all.
        let Some(gsis) = self.starts.len().checked_sub(1) else { return &[] };
        let Some(gsi) = GuestIndex::from(gsi).below(gsis) else { return &[] };
        match (self.starts.get(gsi), self.starts.get(gsi + 1)) {
            (Some(start), Some(end)) => {
                self.targets.get(usize::from(*start)..usize::from(*end)).unwrap_or(&[])
            }
            _ => &[],
        }
    }

    /// Where the GSIs below `end` go.
    pub fn targets_below(&self, end: u32) -> &[Target] {
        match GuestIndex::from(end).of(&self.starts) {
            Some(end) => self.targets.get(..usize::from(*end)).unwrap_or(&[]),
            // No GSI is that high: all of them.
            None => &self.targets,
        }
    }

    /// The MSI of a GSI that goes to nothing else: irqfd keeps it at hand.
    #[inline]
    pub fn msi(&self, gsi: u32) -> Option<Msi> {
        match self.targets(gsi) {
            // An MSI stands alone: new() has refused every other table.
            [Target::Msi(msi)] => Some(*msi),
            _ => None,
        }
    }

    /// The GSI whose line a controller pin is.
    #[inline]
    pub fn gsi_of_pin(&self, chip: Chip, pin: u32) -> Option<u32> {
        let gsi = *GuestIndex::from(pin).of(self.gsi_of_pin.get(chip as usize)?)?;
        u32::try_from(gsi).ok()
    }
}

/// One GSI may go to several controllers, once to each; an MSI stands alone.
fn clashes(present: &[Target], new: &Target) -> bool {
    present.iter().any(|old| match (old, new) {
        (Target::Pin { chip: a, .. }, Target::Pin { chip: b, .. }) => a == b,
        _ => true,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const WIDE: DestRules = DestRules { wide: true, no_broadcast_quirk: false };

    fn pin(gsi: u32, chip: Chip, pin: u32) -> Route {
        Route { gsi, target: Target::Pin { chip, pin } }
    }

    fn msi(gsi: u32, data: u32) -> Route {
        Route { gsi, target: Target::Msi(Msi { address_lo: 0xfee0_0000, address_hi: 0, data }) }
    }

    #[test]
    fn standard_table_connects_both_controllers() {
        let table = Routing::standard().unwrap();
        for gsi in 0..24 {
            let targets = table.targets(gsi);
            assert!(targets.contains(&Target::Pin { chip: Chip::IoApic, pin: gsi }));
            assert_eq!(targets.len(), if gsi < 16 { 2 } else { 1 });
            assert_eq!(table.gsi_of_pin(Chip::IoApic, gsi), Some(gsi));
        }
        assert!(table.targets(9).contains(&Target::Pin { chip: Chip::PicSlave, pin: 1 }));
        assert_eq!(table.gsi_of_pin(Chip::PicSlave, 1), Some(9));
        assert!(table.targets(24).is_empty());
        assert!(table.targets(u32::MAX).is_empty());
    }

    #[test]
    fn entries_are_found_whatever_their_order() {
        let routes = [msi(40, 3), pin(2, Chip::IoApic, 5), msi(7, 1), pin(2, Chip::PicMaster, 0)];
        let table = Routing::new(&routes, DestRules::default()).unwrap();
        assert_eq!(table.targets(2), &[routes[1].target, routes[3].target]);
        assert_eq!(table.msi(40).unwrap().data, 3);
        assert_eq!(table.msi(7).unwrap().data, 1);
        assert_eq!(table.msi(2), None);
        assert!(table.targets(3).is_empty());
        assert_eq!(table.targets_below(7), &[routes[1].target, routes[3].target]);
        assert_eq!(
            [0, 2, 8, 40, 41, 4096].map(|end| table.targets_below(end).len()),
            [0, 0, 3, 3, 4, 4]
        );
        assert_eq!(table.gsi_of_pin(Chip::IoApic, 5), Some(2));
        assert_eq!(table.gsi_of_pin(Chip::IoApic, 2), None);
    }

    #[test]
    fn what_kvm_refuses_is_refused() {
        let refused = |routes: &[Route]| {
            assert_eq!(Routing::new(routes, WIDE).unwrap_err(), RoutingError::Invalid);
        };
        refused(&[pin(4096, Chip::IoApic, 0)]);
        refused(&[pin(0, Chip::IoApic, 24)]);
        refused(&[pin(0, Chip::PicSlave, 8)]);
        refused(&[pin(3, Chip::IoApic, 1), pin(3, Chip::IoApic, 2)]);
        refused(&[pin(3, Chip::IoApic, 1), msi(3, 0)]);
        refused(&[msi(3, 0), msi(3, 0)]);
        refused(&[Route {
            gsi: 0,
            target: Target::Msi(Msi { address_lo: 0, address_hi: 1, data: 0 }),
        }]);
        assert!(Routing::new(&[], DestRules::default()).unwrap().targets(0).is_empty());
    }

    #[test]
    fn the_largest_table_is_taken() {
        let routes: std::vec::Vec<_> = (0..4096).map(|gsi| msi(gsi, gsi)).collect();
        let table = Routing::new(&routes, DestRules::default()).unwrap();
        assert_eq!(table.msi(4095).unwrap().data, 4095);
        assert_eq!(table.msi(0).unwrap().data, 0);
    }
}
