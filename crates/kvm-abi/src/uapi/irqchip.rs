//! Interrupt controllers, PIT, routing and message-signalled interrupts (KVM API §4.24–4.28,
//! §4.52, §4.70–4.72).

use super::run::KVM_IRQCHIP_BYTES;
use zerocopy::{FromBytes, Immutable, IntoBytes};

uapi! {
    /// KVM_IRQ_LINE, KVM_IRQ_LINE_STATUS. `irq` comes back as the status.
    struct KvmIrqLevel {
        irq: u32,
        level: u32,
    }

    /// One 8259A, as KVM_GET_IRQCHIP has it.
    struct KvmPicState {
        last_irr: u8,
        irr: u8,
        imr: u8,
        isr: u8,
        priority_add: u8,
        irq_base: u8,
        read_reg_select: u8,
        poll: u8,
        special_mask: u8,
        init_state: u8,
        auto_eoi: u8,
        rotate_on_auto_eoi: u8,
        special_fully_nested_mode: u8,
        init4: u8,
        elcr: u8,
        elcr_mask: u8,
    }

    /// The I/O APIC; a redirection entry is the register's 64 bits.
    struct KvmIoapicState {
        base_address: u64,
        ioregsel: u32,
        id: u32,
        irr: u32,
        pad: u32,
        redirtbl: [u64; IOAPIC_NUM_PINS],
    }

    /// KVM_GET_IRQCHIP, KVM_SET_IRQCHIP: `chip` starts with a [`KvmPicState`] or a
    /// [`KvmIoapicState`].
    struct KvmIrqchip {
        chip_id: u32,
        pad: u32,
        // Words and no union, which could not be read without `unsafe`.
        chip: [u64; KVM_IRQCHIP_BYTES / 8],
    }

    /// The local APIC's register page, first KiB (KVM_GET_LAPIC, KVM_SET_LAPIC).
    struct KvmLapicState {
        // A KiB of the page of four, as the API has it.
        regs: [u8; 1024],
    }

    /// The argument of KVM_CREATE_PIT2.
    struct KvmPitConfig {
        flags: u32,
        pad: [u32; 15],
    }

    /// One counter of the PIT. `count_load_time` is nanoseconds of the host's monotonic clock.
    struct KvmPitChannelState {
        count: u32,
        latched_count: u16,
        count_latched: u8,
        status_latched: u8,
        status: u8,
        read_state: u8,
        write_state: u8,
        write_latch: u8,
        rw_mode: u8,
        mode: u8,
        bcd: u8,
        gate: u8,
        count_load_time: i64,
    }

    /// The argument of KVM_GET_PIT and KVM_SET_PIT.
    struct KvmPitState {
        channels: [KvmPitChannelState; 3],
    }

    /// The argument of KVM_GET_PIT2 and KVM_SET_PIT2.
    struct KvmPitState2 {
        channels: [KvmPitChannelState; 3],
        flags: u32,
        reserved: [u32; 9],
    }

    /// The argument of KVM_REINJECT_CONTROL.
    struct KvmReinjectControl {
        pit_reinject: u8,
        reserved: [u8; 31],
    }

    /// Head of an array of [`KvmIrqRoutingEntry`] (KVM_SET_GSI_ROUTING).
    struct KvmIrqRouting {
        nr: u32,
        flags: u32,
        // An array of no length: what follows the head in user memory is copied by itself.
        entries: [KvmIrqRoutingEntry; 0],
    }

    /// One route. `u` is read as [`KvmIrqRoutingIrqchip`] or [`KvmIrqRoutingMsi`] according to
    /// `type_`.
    struct KvmIrqRoutingEntry {
        gsi: u32,
        type_: u32,
        flags: u32,
        pad: u32,
        // As words, too.
        u: [u64; 4],
    }

    /// A route to a pin of an interrupt controller.
    struct KvmIrqRoutingIrqchip {
        irqchip: u32,
        pin: u32,
    }

    /// A route to a message.
    struct KvmIrqRoutingMsi {
        address_lo: u32,
        address_hi: u32,
        data: u32,
        devid: u32,
    }

    /// The argument of KVM_SIGNAL_MSI.
    struct KvmMsi {
        address_lo: u32,
        address_hi: u32,
        data: u32,
        flags: u32,
        devid: u32,
        pad: [u8; 12],
    }

    /// The argument of KVM_TPR_ACCESS_REPORTING.
    struct KvmTprAccessCtl {
        enabled: u32,
        flags: u32,
        reserved: [u32; 8],
    }

    /// The argument of KVM_SET_VAPIC_ADDR.
    struct KvmVapicAddr {
        vapic_addr: u64,
    }
}

impl KvmIrqRoutingEntry {
    /// The route read as one to a pin.
    pub const fn irqchip(&self) -> KvmIrqRoutingIrqchip {
        // Words taken apart by shifts, since x86 is little-endian and nothing else is built.
        let [pin, ..] = self.u;
        KvmIrqRoutingIrqchip { irqchip: pin as u32, pin: (pin >> 32) as u32 }
    }

    /// The route read as one to a message.
    pub const fn msi(&self) -> KvmIrqRoutingMsi {
        let [address, data, ..] = self.u;
        KvmIrqRoutingMsi {
            address_lo: address as u32,
            address_hi: (address >> 32) as u32,
            data: data as u32,
            devid: (data >> 32) as u32,
        }
    }

    /// A route of `gsi` to a pin.
    pub const fn to_pin(gsi: u32, irqchip: u32, pin: u32) -> Self {
        let target = irqchip as u64 | (pin as u64) << 32;
        Self { gsi, type_: IRQ_ROUTING_IRQCHIP, flags: 0, pad: 0, u: [target, 0, 0, 0] }
    }

    /// A route of `gsi` to a message.
    pub const fn to_msi(gsi: u32, address: u64, data: u32) -> Self {
        Self { gsi, type_: IRQ_ROUTING_MSI, flags: 0, pad: 0, u: [address, data as u64, 0, 0] }
    }
}

impl KvmIrqchip {
    /// The state in `chip` read as `T`, a [`KvmPicState`] or a [`KvmIoapicState`].
    pub fn read<T: FromBytes + Default>(&self) -> T {
        // Never the default: the union is longer than each state. It spares a panic.
        T::read_from_prefix(self.chip.as_bytes()).map_or_else(|_| T::default(), |(state, _)| state)
    }

    /// Puts `state` into `chip`.
    pub fn write<T: IntoBytes + Immutable>(&mut self, state: &T) {
        // Both states are shorter than the union, which the layout test shows.
        let _ = state.write_to_prefix(self.chip.as_mut_bytes());
    }
}

/// Pins of the I/O APIC.
pub const IOAPIC_NUM_PINS: usize = 24;
/// [`KvmIrqchip::chip_id`] and [`KvmIrqRoutingIrqchip::irqchip`]: the master 8259.
pub const IRQCHIP_PIC_MASTER: u32 = 0;
/// The slave 8259.
pub const IRQCHIP_PIC_SLAVE: u32 = 1;
/// The I/O APIC.
pub const IRQCHIP_IOAPIC: u32 = 2;
/// [`KvmIrqRoutingEntry::type_`]: a pin.
pub const IRQ_ROUTING_IRQCHIP: u32 = 1;
/// [`KvmIrqRoutingEntry::type_`]: a message.
pub const IRQ_ROUTING_MSI: u32 = 2;
/// Most routes, and one more than the highest GSI.
pub const MAX_IRQ_ROUTES: u32 = 4096;
/// [`KvmMsi::flags`], [`KvmIrqRoutingEntry::flags`]: `devid` is significant.
pub const MSI_VALID_DEVID: u32 = 1;
/// [`KvmPitConfig::flags`]: port 0x61 is answered by a stub.
pub const PIT_SPEAKER_DUMMY: u32 = 1;
