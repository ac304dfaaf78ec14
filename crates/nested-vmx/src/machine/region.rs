//! VMXON, VMXOFF, VMCLEAR, VMPTRLD, VMPTRST: the regions in L1's memory.

use x86::vmcs::InstructionError;
use x86::vmcs::capability::feature_control;
use x86::vmcs::place::VMCS12_REVISION;
use x86::{Cr4, Exception, Gpa};
use zerocopy::IntoBytes;

use super::{Address, Cpu, L1, Machine, Then};
use crate::checks::{Limits, is_fixed};
use crate::memory::is_page;
use crate::{Fail, GuestMemory, Vmcs12};

/// Bytes of a region that say what it is: revision and abort indicator.
const HEADER: usize = 8;
/// Byte of a region at which the launch state lies.
const LAUNCH_STATE: u64 = 8;

impl Machine {
    pub(super) fn vmxon_instruction(
        &mut self,
        pointer: Address,
        cpu: &Cpu,
        limits: &Limits,
        l1: &mut impl L1,
    ) -> Result<Then, Fail> {
        // What SMM has put aside is not left by a VMXON in SMM.
        // CR4.VMXE is asked before privilege: without it the instruction does not exist.
        if !cpu.is_mode_right() || cpu.cr4 & Cr4::VMXE.bits() == 0 || self.smm.vmxon {
            return Err(Fail::Fault(Exception::ud()));
        }
        if cpu.cpl > 0 {
            return Err(Fail::Fault(Exception::gp(0)));
        }
        // VMfail, not #GP, and before its operand is read: L1 sees error 15 if it has a VMCS.
        if self.is_in_operation() {
            return Err(Fail::Valid(InstructionError::VmxonInRoot));
        }
        let c = &self.capabilities;
        // Locked by firmware with VMX on; the VMM plays the firmware.
        let needed = feature_control::LOCKED | feature_control::VMX_OUTSIDE_SMX;
        let supported = is_fixed(cpu.cr0, c.cr0_fixed0, c.cr0_fixed1)
            && is_fixed(cpu.cr4, c.cr4_fixed0, c.cr4_fixed1)
            && cpu.feature_control & needed == needed;
        if !supported {
            return Err(Fail::Fault(Exception::gp(0)));
        }
        // Behind all faults: the operand is read last.
        let at = read_pointer(pointer, l1)?;
        let revision = if is_page(at, limits.physical_bits) {
            // No memory, as a wrong revision: VMfailInvalid. There is no current VMCS to tell a number.
            l1.read_u32(Gpa(at)).map_err(|_| Fail::Invalid)?
        } else {
            return Err(Fail::Invalid);
        };
        // Bit 31 is compared along: a shadow VMCS is no VMXON region.
        if revision != VMCS12_REVISION {
            return Err(Fail::Invalid);
        }
        // Nothing of an earlier VMX operation is current.
        self.set_regions(Some(Gpa(at)), None);
        Ok(Then::Next)
    }

    pub(super) fn vmxoff(&mut self, l1: &mut impl L1) -> Result<Then, Fail> {
        // What L1 wrote by VMWRITE is in its memory when it looks: stock KVM writes it back, too.
        self.write_back(l1);
        self.reset();
        Ok(Then::Next)
    }

    pub(super) fn vmclear(
        &mut self,
        pointer: Address,
        limits: &Limits,
        l1: &mut impl L1,
    ) -> Result<Then, Fail> {
        let at = read_pointer(pointer, l1)?;
        // Before the comparison: no region lies at an address that is none.
        if !is_page(at, limits.physical_bits) {
            return Err(Fail::Valid(InstructionError::VmclearAddress));
        }
        if self.vmxon == Some(Gpa(at)) {
            return Err(Fail::Valid(InstructionError::VmclearVmxonPointer));
        }
        // Looked up each time: L1 may have begun to use enlightened VMCSs since.
        if self.asks_assist_page() && self.clear_enlightened(Gpa(at), l1) {
            return Ok(Then::Next);
        }
        if self.current == Some(Gpa(at)) {
            self.vmcs12.set_launched(false);
            // The whole of the private copy, with its launch state: the CPU's cache of the VMCS is gone (§25.11.3).
            self.write_back(l1);
            self.set_regions(self.vmxon, None);
        } else {
            // Where there is no memory there is nothing to clear; a CPU does not tell either.
            let _ = l1.write(Gpa(at.wrapping_add(LAUNCH_STATE)), &[0; 4]);
        }
        Ok(Then::Next)
    }

    pub(super) fn vmptrld(
        &mut self,
        pointer: Address,
        limits: &Limits,
        l1: &mut impl L1,
    ) -> Result<Then, Fail> {
        // The same order as VMCLEAR's, with numbers of its own.
        let at = read_pointer(pointer, l1)?;
        if !is_page(at, limits.physical_bits) {
            return Err(Fail::Valid(InstructionError::VmptrldAddress));
        }
        if self.vmxon == Some(Gpa(at)) {
            return Err(Fail::Valid(InstructionError::VmptrldVmxonPointer));
        }
        // It is not read again: the private copy counts until VMCLEAR.
        // A CPU need not read its region again either (§25.11.1).
        if self.current == Some(Gpa(at)) {
            return Ok(Then::Next);
        }
        let wrong = Fail::Valid(InstructionError::VmptrldRevision);
        // Eight bytes first: what is no VMCS is not copied.
        let mut header = [0; HEADER];
        l1.read(Gpa(at), &mut header).map_err(|_| wrong)?;
        let shadows = x86::vmcs::ProcControls2::SHADOW_VMCS;
        let is_shadow = header[3] & 0x80 != 0;
        let revision = u32::from_le_bytes([header[0], header[1], header[2], header[3] & 0x7f]);
        // A shadow VMCS is one only where the control that uses it is offered.
        if revision != VMCS12_REVISION || is_shadow && !self.capabilities.has_secondary(shadows) {
            return Err(wrong);
        }
        // Only now: a wrong revision leaves the current VMCS what it was.
        self.write_back(l1);
        // From here on no VMCS is current: if the rest of the region cannot be read, L1 sees VMfailInvalid.
        self.set_regions(self.vmxon, None);
        load(&mut self.vmcs12, at, header, l1).map_err(|_| wrong)?;
        // Last, when the copy is whole.
        self.current = Some(Gpa(at));
        Ok(Then::Next)
    }

    pub(super) fn vmptrst(&mut self, to: Address, l1: &mut impl L1) -> Result<Then, Fail> {
        // All ones where none is current (SDM vol. 3C chapter 31, VMPTRST).
        let pointer = self.current.map_or(Vmcs12::NOWHERE, |at| at.0);
        l1.write_linear(to?, &pointer.to_le_bytes())?;
        Ok(Then::Next)
    }

    /// Writes the private copy of the current VMCS into its region. If there is no memory any more, L1 has
    /// lost what it took away.
    pub fn write_back(&self, l1: &impl GuestMemory) {
        if let Some(at) = self.current {
            let _ = l1.write(at, self.vmcs12.as_bytes());
        }
    }
}

/// Reads a region behind its header, which was read before: every byte is read once.
pub(super) fn load(
    image: &mut Vmcs12,
    at: u64,
    header: [u8; HEADER],
    l1: &impl GuestMemory,
) -> Result<(), crate::Outside> {
    let bytes = image.as_mut_bytes();
    let Some((first, rest)) = bytes.split_at_mut_checked(HEADER) else {
        return Err(crate::Outside);
    };
    // The header is the one that was checked, whatever memory says by now.
    first.copy_from_slice(&header);
    l1.read(Gpa(at.wrapping_add(HEADER as u64)), rest)
}

/// The 64-bit pointer in an operand.
fn read_pointer(operand: Address, l1: &mut impl L1) -> Result<u64, Fail> {
    let mut bytes = [0; 8];
    l1.read_linear(operand?, &mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}
