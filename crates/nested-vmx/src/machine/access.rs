//! VMREAD and VMWRITE.

use x86::vmcs::place::{self, Named};
use x86::vmcs::{Group, InstructionError, Shadow, field};
use x86::{Direction, Gpa};

use super::enlightened::owes;
use super::{Cpu, L1, Level, Machine, Place, Then};
use crate::{Fail, Vmcs12, merge};

impl Machine {
    pub(super) fn vmread(
        &mut self,
        encoding: u64,
        to: Place,
        cpu: &Cpu,
        l1: &mut impl L1,
    ) -> Result<Then, Fail> {
        // With an enlightened VMCS none is current: stock KVM reads its page then.
        let named = match self.named(encoding, cpu) {
            Err(Fail::Invalid) if self.reads_page() => {
                return self.vmread_page(self.encoding(encoding, cpu), to, cpu, l1);
            }
            named => named?,
        };
        let value = match self.level {
            // L2 reads the copy that was made at its entry: L1's memory is not asked again.
            Level::L1 => {
                self.mirror.use_by_exit(named, Direction::Read);
                self.vmcs12.read(named)
            }
            Level::L2 => self.shadow12.read(named),
        };
        self.give(value, to, cpu, l1)
    }

    /// VMREAD of L1's for which nothing has to be fetched ([`Self::needs`]), by code of 64 bits in VMX operation, at CPL 0.
    /// `None`: it does not succeed, or is a rare one, and is executed as any other instruction ([`Self::execute`]).
    #[inline]
    pub fn read_quickly(&mut self, encoding: u64) -> Option<u64> {
        let named = self.find_quickly(encoding)?;
        self.mirror.use_by_exit(named, Direction::Read);
        Some(self.vmcs12.read(named))
    }

    /// VMWRITE, as [`read_quickly`](Self::read_quickly).
    #[inline]
    pub fn write_quickly(&mut self, encoding: u64, value: u64) -> Option<()> {
        let named = self.find_quickly(encoding)?;
        // Whether it may be written is a matter of what is offered.
        if named.read_only {
            return None;
        }
        self.set_field(encoding, named, value);
        Some(())
    }

    #[inline]
    fn find_quickly(&self, encoding: u64) -> Option<Named> {
        // Without a current VMCS an enlightened one may be what is meant.
        if self.level != Level::L1 || self.current.is_none() {
            return None;
        }
        place::find(encoding)
    }

    /// Gives the value of a field to whoever asked for it.
    pub(super) fn give(
        &mut self,
        value: u64,
        to: Place,
        cpu: &Cpu,
        l1: &mut impl L1,
    ) -> Result<Then, Fail> {
        match to {
            Place::Register(n) if cpu.is_64_bit => Ok(Then::Register(n, value)),
            // Outside 64-bit mode the upper half of a register is not L1's.
            Place::Register(n) => Ok(Then::Register(n, u64::from(value as u32))),
            Place::Memory(at) => {
                let bytes = value.to_le_bytes();
                let (low, _) = bytes.split_at(4);
                // The operand's fault comes here, behind all that VMREAD fails by: a CPU does not touch memory before.
                l1.write_linear(at?, if cpu.is_64_bit { &bytes } else { low })?;
                Ok(Then::Next)
            }
        }
    }

    pub(super) fn vmwrite(
        &mut self,
        encoding: u64,
        from: Place,
        register: u64,
        cpu: &Cpu,
        l1: &mut impl L1,
    ) -> Result<Then, Fail> {
        // VMfailInvalid goes before a fault of the operand.
        self.has_target()?;
        // The source is read before the field is looked at: a fault of its own goes before VMfailValid.
        let value = match from {
            Place::Register(_) if cpu.is_64_bit => register,
            Place::Register(_) => u64::from(register as u32),
            Place::Memory(at) => {
                let mut bytes = [0; 8];
                let (low, _) = bytes.split_at_mut(if cpu.is_64_bit { 8 } else { 4 });
                l1.read_linear(at?, low)?;
                u64::from_le_bytes(bytes)
            }
        };
        let named = self.named(encoding, cpu)?;
        // Reached only if a VMM has taken WRITE_ALL away: stock KVM offers it, too.
        if named.read_only && !self.capabilities.writes_all() {
            return Err(Fail::Valid(InstructionError::ReadOnlyField));
        }
        self.set_field(self.encoding(encoding, cpu), named, value);
        Ok(Then::Next)
    }

    /// Sets a field as VMWRITE does, and makes its group dirty if it has another value now.
    pub(crate) fn set_field(&mut self, encoding: u64, named: Named, value: u64) {
        match self.level {
            Level::L1 => {
                self.mirror.use_by_exit(named, Direction::Write);
                // The same value again leaves everything composed and checked as it is: hypervisors write fields whole.
                if self.vmcs12.write(encoding, named, value) {
                    self.change(named.place.group);
                    self.dirty = self.dirty.union(merge::follows(encoding as u32));
                    // A field that the hardware serves is given to it before L1 runs again.
                    self.mirror.due |= named.place.shadow != Shadow::No;
                }
            }
            Level::L2 => {
                if self.shadow12.write(encoding, named, value) {
                    // L1's memory gets it when L2 has left: nobody else may look at an active VMCS (§25.11.1).
                    self.owes |= owes::SHADOW;
                }
            }
        }
    }

    /// L1 has changed a field of a group. What else [`merge::follows`] from the field is the caller's to add.
    pub(super) fn change(&mut self, group: Group) {
        self.dirty.add(group);
        self.unchecked.add(group);
        // These two decide what an exit loads as L1's segments.
        self.host_changed |= matches!(group, Group::Host | Group::Controls);
    }

    /// Whether there is a VMCS to be accessed: the current one, for L2 the one that the link points at.
    fn has_target(&self) -> Result<(), Fail> {
        let there = match self.level {
            Level::L1 => self.current.is_some(),
            // Without a link pointer L2 has no current VMCS: VMfailInvalid, as stock KVM tells it.
            Level::L2 => self.vmcs12.get(field::VMCS_LINK) != Vmcs12::NOWHERE,
        };
        if there { Ok(()) } else { Err(Fail::Invalid) }
    }

    fn named(&self, encoding: u64, cpu: &Cpu) -> Result<Named, Fail> {
        // Asked again: VMREAD comes here without having asked.
        self.has_target()?;
        place::find(self.encoding(encoding, cpu))
            .ok_or(Fail::Valid(InstructionError::UnsupportedField))
    }

    fn encoding(&self, register: u64, cpu: &Cpu) -> u64 {
        // Bits 63:32 are no part of the operand there. In 64-bit mode they are, and no field has one of them.
        if cpu.is_64_bit { register } else { u64::from(register as u32) }
    }

    /// Reads the shadow VMCS that serves L2, before L2 runs. What cannot be read is zeros: another L2's is nothing for this
    /// one.
    pub fn load_shadow(&mut self, l1: &impl crate::GuestMemory) {
        use zerocopy::IntoBytes;
        // Not under VMREAD: the copy is taken once, and L1's other vCPUs may write the region meanwhile.
        if let Some(Gpa(at)) = self.vmcs12.shadow_pointer()
            && l1.read(Gpa(at), self.shadow12.as_mut_bytes()).is_err()
        {
            self.shadow12.as_mut_bytes().fill(0);
        }
        // What the last L2 wrote was written back, or is of a run that is over.
        self.owes &= !owes::SHADOW;
    }

    /// Whether the end of L2's run writes to L1's memory: to a shadow VMCS, or an enlightened one.
    #[inline]
    pub fn owes_memory(&self) -> bool {
        self.owes != 0
    }

    /// Writes that shadow VMCS back after L2 has run, if L2 has changed it.
    pub fn store_shadow(&mut self, l1: &impl crate::GuestMemory) {
        use zerocopy::IntoBytes;
        let owed = self.owes & owes::SHADOW != 0;
        // The bit goes first: a page that cannot be written is not tried at each exit.
        self.owes &= !owes::SHADOW;
        if owed && let Some(at) = self.vmcs12.shadow_pointer() {
            // L1 has taken the page away while L2 ran: it has lost what would be there.
            let _ = l1.write(at, self.shadow12.as_bytes());
        }
    }
}
