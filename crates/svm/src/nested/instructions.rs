//! SVM's instructions, carried out for L1. VMRUN is in [`run`](super::run).

use core::mem::offset_of;

use backend::{Executed, Gprs, L1Memory, Level, RAX, RCX};
use cpu::Cpu;
use nested_svm::instructions::{self, Caller, Instruction, Then};
use x86::{
    Cr0, Efer, Exception, Gpa, Rflags,
    segment::attr,
    vmcb::{Clean, ExitCode, SEG_CS, SEG_FS, SEG_GS, SEG_LDTR, SEG_TR, Save, Vmcb, VmcbSegment},
};
use zerocopy::IntoBytes;

use crate::{msrs::LOW, state::Svm};

/// Where the save area begins.
const SAVE: u64 = offset_of!(Vmcb, save) as u64;
/// Bytes of a segment.
const SEGMENT: u64 = size_of::<VmcbSegment>() as u64;
/// The segments that VMLOAD and VMSAVE move: the first, and how many lie side by side.
const SEGMENTS: [(usize, usize); 3] = [(SEG_FS, 2), (SEG_LDTR, 1), (SEG_TR, 1)];
/// Where the MSRs that they move begin: STAR to SYSENTER_EIP, side by side.
const MSRS: u64 = SAVE + offset_of!(Save, star) as u64;

const _: () = {
    assert!(SEG_GS == SEG_FS + 1);
    assert!(offset_of!(Save, sysenter_eip) == offset_of!(Save, star) + 7 * 8);
};

impl<C: Cpu> Svm<C> {
    /// Executes the instruction that the last exit was for.
    #[inline(always)]
    pub(super) fn execute_instruction(
        &mut self,
        gprs: &mut Gprs,
        next_rip: u64,
        l1: &impl L1Memory,
    ) -> Executed {
        let instruction = match ExitCode(self.vmcb().control.exit_code) {
            ExitCode::Vmrun => Instruction::Vmrun,
            ExitCode::Vmload => Instruction::Vmload,
            ExitCode::Vmsave => Instruction::Vmsave,
            ExitCode::Stgi => Instruction::Stgi,
            ExitCode::Clgi => Instruction::Clgi,
            ExitCode::Invlpga => Instruction::Invlpga,
            _ => Instruction::Skinit,
        };
        // Privilege, mode and address first: the rules have the order of the manual's faults.
        match instructions::execute(instruction, &self.caller(gprs), &self.cold.offered) {
            Err(exception) => Executed::Fault(exception),
            // L1 always intercepts VMRUN of L2: its block was refused else.
            Ok(Then::Enter(_)) if self.level == Level::L2 => Executed::Fault(Exception::ud()),
            Ok(Then::Enter(at)) => self.vmrun(gprs, at, next_rip, l1),
            Ok(Then::Load(at)) => self.vmload(at, l1),
            Ok(Then::Save(at)) => self.vmsave(at, l1),
            Ok(Then::SetGif) => {
                self.gif.set();
                Executed::Opened
            }
            Ok(Then::ClearGif) => {
                self.gif.clear();
                Executed::Closed
            }
            Ok(Then::Invalidate { .. }) => {
                self.block.request_flush();
                // The ASIDs that L1 names stand for ours, one for each level.
                self.flush_other_block();
                self.flush_l2();
                Executed::Retired
            }
        }
    }

    /// Makes of #GP, which has met no delivery, the exit of the instruction that the CPU would have left the guest for, had
    /// it not looked at the address before: `code` lies at RIP.
    #[cold]
    #[inline(never)]
    pub(super) fn takes_fault(&mut self, gprs: &Gprs, code: &[u8]) -> bool {
        let (exit, instruction) = match code {
            [0x0f, 0x01, 0xd8, ..] => (ExitCode::Vmrun, Instruction::Vmrun),
            [0x0f, 0x01, 0xda, ..] => (ExitCode::Vmload, Instruction::Vmload),
            [0x0f, 0x01, 0xdb, ..] => (ExitCode::Vmsave, Instruction::Vmsave),
            _ => return false,
        };
        const LENGTH: u64 = 3;
        let control = &self.vmcb().control;
        // A #GP for the address has error code 0. Any other is the guest's own.
        let is_plain =
            ExitCode(control.exit_code) == ExitCode::ExcpGp && control.exit_info_1 as u32 == 0;
        // Where the CPU moves for L2, by L1's tables, the fault is one of these, or none of the address. VMRUN's does not.
        let is_virtual = instruction != Instruction::Vmrun
            && self.level == Level::L2
            && self.nested.as_ref().is_some_and(|state| {
                nested_svm::merge::moves_by_cpu(state.v12.control(), &self.cold.offered)
            });
        // What is a fault in any case stays one.
        if !is_plain
            || is_virtual
            || instructions::execute(instruction, &self.caller(gprs), &self.cold.offered).is_err()
        {
            return false;
        }
        let block = self.vmcb_mut(Clean::empty());
        block.control.exit_code = exit.0;
        (block.control.exit_info_1, block.control.exit_info_2) = (0, 0);
        // The CPU says the next RIP at an intercepted instruction, not at a #GP.
        block.control.next_rip = block.save.rip.wrapping_add(LENGTH);
        true
    }

    /// What an instruction comes to whose block is no memory. As on newer stock KVM the VMM hears of it, whose doing that
    /// is; of L2's it is #GP, as on older ones, so that a guest's guest cannot stop its hypervisor.
    pub(super) fn missing(&self, l1: &impl L1Memory) -> Executed {
        match self.level {
            _ if !l1.is_final() => Executed::Outside,
            Level::L1 => Executed::NoPage,
            Level::L2 => Executed::Fault(Exception::gp(0)),
        }
    }

    fn caller(&self, gprs: &Gprs) -> Caller {
        let save = &self.vmcb().save;
        let efer = Efer::from_bits_retain(save.efer & self.efer_shown);
        let is_64_bit = efer.contains(Efer::LMA)
            && save.segments.get(SEG_CS).is_some_and(|cs| cs.attrib & attr::L != 0);
        let rax = gprs.0[RAX];
        Caller {
            cr0: Cr0::from_bits_retain(save.cr0),
            efer,
            rflags: Rflags::from_bits_retain(save.rflags),
            cpl: save.cpl,
            // The operand has the width of the mode; what lies above is left from other code.
            rax: if is_64_bit { rax } else { rax & 0xffff_ffff },
            ecx: gprs.0[RCX] as u32,
        }
    }

    /// VMLOAD: by way of our own block, which the CPU loads from. The CPU sees to what is no address.
    #[inline(never)]
    fn vmload(&mut self, at: Gpa, l1: &impl L1Memory) -> Executed {
        let mut segments = [VmcbSegment::default(); 4];
        let mut msrs = [0_u64; 8];
        // Read to the stack first: a page that is missing leaves the registers as they were.
        let mut rest = &mut segments[..];
        for (first, count) in SEGMENTS {
            let Some((these, others)) = rest.split_at_mut_checked(count) else { break };
            rest = others;
            if l1.read(segment_at(at, first), these.as_mut_bytes()).is_err() {
                return self.missing(l1);
            }
        }
        if l1.read(Gpa(at.0 + MSRS), msrs.as_mut_bytes()).is_err() {
            return self.missing(l1);
        }
        let save = &mut self.vmcb_mut(Clean::empty()).save;
        for (to, from) in [SEG_FS, SEG_GS, SEG_LDTR, SEG_TR].into_iter().zip(segments) {
            if let Some(to) = save.segments.get_mut(to) {
                *to = from;
            }
        }
        let [star, lstar, cstar, sfmask, kernel_gs_base, cs, esp, eip] = msrs;
        (save.star, save.lstar, save.cstar, save.sfmask) = (star, lstar, cstar, sfmask);
        save.kernel_gs_base = kernel_gs_base;
        (save.sysenter_cs, save.sysenter_esp, save.sysenter_eip) = (cs, esp, eip);
        self.cold.sysenter_high = [esp & !LOW, eip & !LOW];
        // Inside the loop these registers are in the CPU, and not in the block.
        if self.loaded {
            self.cpu.vmload(self.block.hpa());
        }
        Executed::Retired
    }

    /// VMSAVE: by way of our own block, which the CPU saves to.
    #[inline(never)]
    fn vmsave(&mut self, at: Gpa, l1: &impl L1Memory) -> Executed {
        // The block is stale inside the loop, see the module's head in `enter`.
        if self.loaded {
            self.cpu.vmsave(self.block.hpa());
        }
        let save = &self.vmcb().save;
        for (first, count) in SEGMENTS {
            let Some(these) = save.segments.get(first..first + count) else { continue };
            if l1.write(segment_at(at, first), these.as_bytes()).is_err() {
                return self.missing(l1);
            }
        }
        let [esp_high, eip_high] = self.cold.sysenter_high;
        let msrs = [
            save.star,
            save.lstar,
            save.cstar,
            save.sfmask,
            save.kernel_gs_base,
            save.sysenter_cs,
            self.sysenter(save.sysenter_esp, esp_high),
            self.sysenter(save.sysenter_eip, eip_high),
        ];
        if l1.write(Gpa(at.0 + MSRS), msrs.as_bytes()).is_err() {
            return self.missing(l1);
        }
        Executed::Retired
    }
}

/// Where a segment of the block at `at` lies.
const fn segment_at(at: Gpa, index: usize) -> Gpa {
    Gpa(at.0 + SAVE + index as u64 * SEGMENT)
}
