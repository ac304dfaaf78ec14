//! What SVM's instructions of L1 do: VMRUN, VMLOAD, VMSAVE, STGI, CLGI, INVLPGA, SKINIT; and SVM's own MSRs.
//!
//! Each begins with the same checks in the same order (APM vol. 3, each instruction's pseudo-code): SVM enabled and
//! protected mode, else #UD; privilege, else #GP. Whether a hypervisor above intercepts it was asked before, since
//! an intercept comes before the exception of privilege only where APM vol. 2 table 15-7 says so.

use x86::{Cr0, Efer, Exception, Gpa, Rflags, addr::PAGE_SIZE};

use crate::Offered;

/// An instruction that SVM gives a hypervisor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Instruction {
    /// VMRUN RAX.
    Vmrun,
    /// VMLOAD RAX.
    Vmload,
    /// VMSAVE RAX.
    Vmsave,
    /// STGI.
    Stgi,
    /// CLGI.
    Clgi,
    /// INVLPGA RAX, ECX.
    Invlpga,
    /// SKINIT EAX.
    Skinit,
}

/// The registers of whoever executes one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Caller {
    /// CR0.
    pub cr0: Cr0,
    /// EFER.
    pub efer: Efer,
    /// RFLAGS.
    pub rflags: Rflags,
    /// Current privilege level.
    pub cpl: u8,
    /// RAX, cut to the address size of the instruction.
    pub rax: u64,
    /// ECX.
    pub ecx: u32,
}

/// What an instruction comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// L2 is to be entered by the block at this address; RIP is past VMRUN before.
    Enter(Gpa),
    /// FS, GS, TR, LDTR, KernelGSBase and the SYSCALL and SYSENTER MSRs are loaded from the block there.
    Load(Gpa),
    /// They are saved to it.
    Save(Gpa),
    /// GIF is set: what waited for it may be deliverable.
    SetGif,
    /// GIF is clear.
    ClearGif,
    /// Translations of this linear address under this address-space id are forgotten.
    Invalidate {
        /// The linear address.
        address: u64,
        /// The address-space id: 0 is L1's own.
        asid: u32,
    },
}

/// What `instruction` does.
///
/// # Errors
/// The exception that it raises.
pub fn execute(
    instruction: Instruction,
    caller: &Caller,
    offered: &Offered,
) -> Result<Then, Exception> {
    // SKINIT and its secure loader are not offered (CPUID Fn8000_0001 ECX[SKINIT] = 0).
    // #UD before #GP (APM vol. 3, each instruction).
    // SKINIT is tested with the rest: where it is not offered it is undefined at every privilege.
    if instruction == Instruction::Skinit || !is_enabled(caller) {
        return Err(Exception::ud());
    }
    // Behind #UD and before RAX is looked at: a program that is not the kernel learns nothing of addresses.
    if caller.cpl != 0 {
        return Err(Exception::gp(0));
    }
    match instruction {
        Instruction::Vmrun => block(caller, offered).map(Then::Enter),
        Instruction::Vmload => block(caller, offered).map(Then::Load),
        Instruction::Vmsave => block(caller, offered).map(Then::Save),
        Instruction::Stgi => Ok(Then::SetGif),
        Instruction::Clgi => Ok(Then::ClearGif),
        // Any id may be named, those of nobody too. 0 is L1's own; L2's are one id of L0's.
        Instruction::Invlpga => Ok(Then::Invalidate { address: caller.rax, asid: caller.ecx }),
        Instruction::Skinit => Err(Exception::ud()),
    }
}

/// EFER.SVME, and protected mode that is not virtual-8086 mode.
fn is_enabled(caller: &Caller) -> bool {
    // Paging is not asked: SVM's instructions work in protected mode without it, too.
    caller.efer.contains(Efer::SVME)
        && caller.cr0.contains(Cr0::PE)
        && !caller.rflags.contains(Rflags::VM)
}

/// The block that RAX names: a page of the physical addresses. Whether it is memory shows when it is read.
fn block(caller: &Caller, offered: &Offered) -> Result<Gpa, Exception> {
    // The CPU would refuse it with #GP, too.
    // An address that is no memory is found out by who reads it: a CPU would take the bus's answer for a block.
    if caller.rax & (PAGE_SIZE - 1) != 0 || !offered.is_address(caller.rax) {
        return Err(Exception::gp(0));
    }
    Ok(Gpa(caller.rax))
}

/// VM_CR (MSR C001_0114).
pub mod vm_cr {
    /// Debugging through a DPD connector is off.
    pub const DPD: u64 = 1 << 0;
    /// INITs are redirected.
    pub const R_INIT: u64 = 1 << 1;
    /// A20 masking is off.
    pub const DIS_A20M: u64 = 1 << 2;
    /// SVMDIS and LOCK cannot be changed.
    pub const LOCK: u64 = 1 << 3;
    /// EFER.SVME cannot be set.
    pub const SVMDIS: u64 = 1 << 4;
    /// All that exist.
    pub const ALL: u64 = DPD | R_INIT | DIS_A20M | LOCK | SVMDIS;
}

/// What VM_CR holds after L1 wrote `new` over `old` (APM vol. 2 §15.30.1). LOCK and SVMDIS are kept once LOCK is
/// set. `efer`: of L1.
///
/// # Errors
/// #GP: a bit that does not exist; SVMDIS while SVM is enabled.
pub fn write_vm_cr(old: u64, new: u64, efer: Efer) -> Result<u64, Exception> {
    // Bits that do not exist are #GP before any is changed. Stock KVM keeps the two once SVMDIS is set; the manual says LOCK.
    if new & !vm_cr::ALL != 0 {
        return Err(Exception::gp(0));
    }
    // LOCK keeps itself and SVMDIS: the others can be written as long as the machine runs.
    let kept = if old & vm_cr::LOCK != 0 { vm_cr::LOCK | vm_cr::SVMDIS } else { 0 };
    let value = (new & !kept) | (old & kept);
    // With SVM in use SVMDIS would take its own hypervisor's instructions away.
    if value & vm_cr::SVMDIS != 0 && efer.contains(Efer::SVME) {
        return Err(Exception::gp(0));
    }
    Ok(value)
}

/// Whether VM_HSAVE_PA (MSR C001_0117) may hold `value`: a page of the physical addresses (APM vol. 2 §15.30.4).
/// Nothing is ever written there: L1's state stays in block 01.
pub fn is_host_save_area(value: u64, offered: &Offered) -> bool {
    // 0 passes, too: L1 writes it to give the page back.
    value & (PAGE_SIZE - 1) == 0 && offered.is_address(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    const OFFERED: Offered = Offered {
        physical_bits: 40,
        flush_by_asid: false,
        npt: false,
        nrip_save: false,
        decode_assists: false,
        pause_filter: false,
        pause_threshold: false,
        vgif: false,
        virtual_vmload: false,
        wide_sysenter: false,
        lbr: false,
        vnmi: false,
        cr4: 0,
        efer: 0,
    };
    const ALL: [Instruction; 7] = [
        Instruction::Vmrun,
        Instruction::Vmload,
        Instruction::Vmsave,
        Instruction::Stgi,
        Instruction::Clgi,
        Instruction::Invlpga,
        Instruction::Skinit,
    ];

    fn kernel() -> Caller {
        Caller { cr0: Cr0::PE, efer: Efer::SVME, rax: 0x1000, ecx: 7, ..Caller::default() }
    }

    #[test]
    fn without_svm_every_instruction_is_undefined() {
        let disabled = Caller { efer: Efer::empty(), cpl: 3, ..kernel() };
        let real = Caller { cr0: Cr0::empty(), ..kernel() };
        let v86 = Caller { rflags: Rflags::VM, cpl: 3, ..kernel() };
        for instruction in ALL {
            for caller in [disabled, real, v86] {
                assert_eq!(execute(instruction, &caller, &OFFERED), Err(Exception::ud()));
            }
        }
    }

    #[test]
    fn user_programs_get_a_protection_fault() {
        let user = Caller { cpl: 3, ..kernel() };
        for instruction in ALL.into_iter().filter(|i| *i != Instruction::Skinit) {
            assert_eq!(execute(instruction, &user, &OFFERED), Err(Exception::gp(0)));
        }
    }

    #[test]
    fn a_block_is_a_page_of_the_physical_addresses() {
        assert_eq!(execute(Instruction::Vmrun, &kernel(), &OFFERED), Ok(Then::Enter(Gpa(0x1000))));
        for rax in [0x1008, 1 << 40, !0xfff] {
            let caller = Caller { rax, ..kernel() };
            for instruction in [Instruction::Vmrun, Instruction::Vmload, Instruction::Vmsave] {
                assert_eq!(execute(instruction, &caller, &OFFERED), Err(Exception::gp(0)));
            }
        }
    }

    #[test]
    fn the_rest_does_what_its_name_says() {
        assert_eq!(execute(Instruction::Stgi, &kernel(), &OFFERED), Ok(Then::SetGif));
        assert_eq!(execute(Instruction::Clgi, &kernel(), &OFFERED), Ok(Then::ClearGif));
        let forgotten = Then::Invalidate { address: 0x1000, asid: 7 };
        assert_eq!(execute(Instruction::Invlpga, &kernel(), &OFFERED), Ok(forgotten));
        assert_eq!(execute(Instruction::Skinit, &kernel(), &OFFERED), Err(Exception::ud()));
    }

    #[test]
    fn a_locked_vm_cr_keeps_svmdis() {
        let locked = vm_cr::LOCK | vm_cr::SVMDIS;
        assert_eq!(write_vm_cr(0, locked, Efer::empty()), Ok(locked));
        assert_eq!(write_vm_cr(locked, vm_cr::R_INIT, Efer::empty()), Ok(locked | vm_cr::R_INIT));
        assert_eq!(write_vm_cr(0, vm_cr::SVMDIS, Efer::SVME), Err(Exception::gp(0)));
        assert_eq!(write_vm_cr(0, 1 << 5, Efer::empty()), Err(Exception::gp(0)));
        assert_eq!(write_vm_cr(vm_cr::LOCK, vm_cr::SVMDIS, Efer::SVME), Ok(vm_cr::LOCK));
    }

    #[test]
    fn the_host_save_area_is_a_page() {
        assert!(is_host_save_area(0x2000, &OFFERED) && is_host_save_area(0, &OFFERED));
        assert!(!is_host_save_area(0x2001, &OFFERED) && !is_host_save_area(1 << 40, &OFFERED));
    }
}
