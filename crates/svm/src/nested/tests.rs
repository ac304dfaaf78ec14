//! What our own words change to while a guest's guest is there, in blocks that nobody shows.

use backend::{
    Executed, GuestLimits, L1Memory, Nested, Outside, Permissions, RAX, Reach, Translation,
};
use cpu::{Counting, Model};
use x86::{Directions, Efer, msr, vmcb::Intercept3};
use zerocopy::{FromZeros, IntoBytes};

use super::*;
use crate::features::Features;

/// L1's memory: a block that may be run at 0, and zeroes: a map under which nothing exits.
struct Block(x86::vmcb::Vmcb);

impl L1Memory for Block {
    fn read(&self, at: Gpa, into: &mut [u8]) -> Result<(), Outside> {
        into.fill(0);
        if let Some(from) = self.0.as_bytes().get(at.0 as usize..) {
            for (to, from) in into.iter_mut().zip(from) {
                *to = *from;
            }
        }
        Ok(())
    }
    fn write(&self, _: Gpa, _: &[u8]) -> Result<(), Outside> {
        Ok(())
    }
    fn translate(&self, _: u64, _: Direction) -> Result<Gpa, Reach> {
        Err(Reach::Outside)
    }
    fn is_final(&self) -> bool {
        true
    }
}

fn in_l2() -> (Svm<Counting<Model>>, Gprs, Block) {
    in_l2_with(false)
}

fn in_l2_with(v_vmload: bool) -> (Svm<Counting<Model>>, Gprs, Block) {
    let features =
        Features { asids: 8, npt: true, nrip_save: true, v_vmload, ..Features::default() };
    let _ = crate::percpu::set_up(features, 4);
    let mut svm = Svm::new(Counting::new(Model::default()), features).unwrap();
    let efer = (Efer::SVME | Efer::LME | Efer::SCE).bits();
    svm.set_limits(GuestLimits {
        efer_allowed: efer,
        maxphyaddr: 40,
        svm_features: 1 << 3,
        ..GuestLimits::default()
    });
    let mut block = Block(x86::vmcb::Vmcb::new_zeroed());
    block.0.control.intercepts[3] = Intercept3::MSR.bits();
    block.0.control.intercepts[4] = 1;
    block.0.control.msrpm_base_pa = 0x2000;
    block.0.control.asid = 1;
    block.0.save.efer = Efer::SVME.bits();
    backend::ControlRegisters::set_efer(&mut svm, Efer::SVME);
    backend::ControlRegisters::set_cr0(&mut svm, x86::Cr0::PE);
    let mut gprs = Gprs::default();
    gprs.0[RAX] = 0;
    svm.vmcb_mut(Clean::empty()).control.exit_code = ExitCode::Vmrun.0;
    assert_eq!(svm.execute(&mut gprs, 3, &block), Executed::Entered);
    (svm, gprs, block)
}

#[test]
fn a_filter_that_is_set_while_l2_runs_is_in_force_for_it() {
    let (mut svm, mut gprs, block) = in_l2();
    assert_eq!(svm.block.msr_map.intercepted(msr::KERNEL_GS_BASE), Directions::empty());
    svm.set_msr_filter(|index| Directions::READS.when(index == msr::KERNEL_GS_BASE));
    assert!(svm.block.msr_map.intercepted(msr::KERNEL_GS_BASE).contains(Directions::READS));
    // And at its next entry, with what stays open.
    svm.vmcb_mut(Clean::empty()).control.exit_code = ExitCode::Invalid.0;
    assert_eq!(svm.reflect(&mut gprs, &block), Executed::Left);
    svm.vmcb_mut(Clean::empty()).control.exit_code = ExitCode::Vmrun.0;
    assert_eq!(svm.execute(&mut gprs, 3, &block), Executed::Entered);
    assert_eq!(svm.block.msr_map.intercepted(msr::KERNEL_GS_BASE), Directions::READS);
    assert_eq!(svm.block.msr_map.intercepted(msr::STAR), Directions::empty());
}

/// What the CPU refuses though we did not is neither clean in its block nor in L1's copy: all of it is entered anew.
#[test]
fn what_the_cpu_has_refused_is_entered_as_a_whole() {
    const CR2: u64 = 0x7777;
    for (code, anew) in [(ExitCode::Invalid, true), (ExitCode::Cpuid, false)] {
        let (mut svm, mut gprs, mut block) = in_l2();
        let flags = svm.claims(&gprs, &block);
        assert_eq!(flags, Ok(Claim::L0));
        svm.vmcb_mut(Clean::empty()).control.exit_code = code.0;
        assert_eq!(svm.reflect(&mut gprs, &block), Executed::Left);
        // L1 calls all of it clean, and has changed some of it.
        block.0.control.clean = Clean::ALL.bits();
        block.0.save.cr2 = CR2;
        svm.vmcb_mut(Clean::empty()).control.exit_code = ExitCode::Vmrun.0;
        assert_eq!(svm.execute(&mut gprs, 3, &block), Executed::Entered);
        assert_eq!(svm.vmcb().save.cr2 == CR2, anew);
    }
}

#[test]
fn another_root_while_l1_runs_flushes_l2s_block() {
    let (mut svm, mut gprs, block) = in_l2();
    svm.vmcb_mut(Clean::empty()).control.exit_code = ExitCode::Invalid.0;
    assert_eq!(svm.reflect(&mut gprs, &block), Executed::Left);
    let flushes = |svm: &mut Svm<Counting<Model>>| {
        let state = svm.nested.as_mut().unwrap();
        state.other.take_flush()
    };
    assert!(flushes(&mut svm), "it never ran");
    assert!(!flushes(&mut svm));
    svm.set_tdp_root(Hpa(0x7000));
    assert!(flushes(&mut svm));
}

#[test]
fn vmload_of_l1_is_the_cpus_while_svm_is_on_and_that_of_l2_never() {
    use backend::ControlRegisters;
    let both = (Intercept4::VMLOAD | Intercept4::VMSAVE).bits();
    let found = |svm: &Svm<Counting<Model>>| {
        let control = &svm.vmcb().control;
        (control.intercepts[4] & both, control.virt_ext)
    };
    let (mut svm, mut gprs, block) = in_l2_with(true);
    assert_eq!(found(&svm), (both, 0), "L2");
    svm.vmcb_mut(Clean::empty()).control.exit_code = ExitCode::Vmrun.0;
    assert_eq!(svm.reflect(&mut gprs, &block), Executed::Left);
    assert_eq!(found(&svm), (0, 2), "L1");
    svm.set_efer(Efer::LME);
    assert_eq!(found(&svm), (both, 0), "without SVM");
    svm.set_efer(Efer::SVME);
    assert_eq!(found(&svm), (0, 2));
    let (mut svm, mut gprs, block) = in_l2();
    svm.vmcb_mut(Clean::empty()).control.exit_code = ExitCode::Vmrun.0;
    assert_eq!(svm.reflect(&mut gprs, &block), Executed::Left);
    assert_eq!(found(&svm), (both, 0), "the CPU cannot");
}

/// User space offers features while a restored L2 is to run, and our own intercepts change. That is refused elsewhere; here
/// its block is without them.
#[test]
fn what_is_offered_behind_vmrun_opens_nothing_in_a_block_without_it() {
    let opens = Intercept4::VMLOAD | Intercept4::VMSAVE | Intercept4::STGI | Intercept4::CLGI;
    let limits =
        GuestLimits { efer_allowed: Efer::SVME.bits(), maxphyaddr: 40, ..GuestLimits::default() };
    let features = Features {
        asids: 8,
        npt: true,
        nrip_save: true,
        v_vmload: true,
        vgif: true,
        ..Features::default()
    };
    let _ = crate::percpu::set_up(features, 4);
    let mut svm = Svm::new(Counting::new(Model::default()), features).unwrap();
    svm.set_limits(GuestLimits { svm_features: 1 | 1 << 3, ..limits });
    let mut block = Block(x86::vmcb::Vmcb::new_zeroed());
    block.0.control.intercepts[4] = 1;
    block.0.control.asid = 1;
    (block.0.control.np_ctl, block.0.control.virt_ext) = (1, 2);
    block.0.control.int_ctl = vintr::GIF | vintr::GIF_ENABLE;
    block.0.save.efer = Efer::SVME.bits();
    backend::ControlRegisters::set_efer(&mut svm, Efer::SVME);
    backend::ControlRegisters::set_cr4(&mut svm, Cr4::PAE);
    backend::ControlRegisters::set_cr0(&mut svm, x86::Cr0::PE | x86::Cr0::PG);
    let mut gprs = Gprs::default();
    svm.vmcb_mut(Clean::empty()).control.exit_code = ExitCode::Vmrun.0;
    assert_eq!(svm.execute(&mut gprs, 3, &block), Executed::Entered);
    let open = |svm: &Svm<Counting<Model>>| opens.bits() & !svm.vmcb().control.intercepts[4];
    assert_eq!((open(&svm), svm.vmcb().control.virt_ext), (0, 0));
    svm.set_limits(GuestLimits { svm_features: 1 | 1 << 3 | 1 << 15 | 1 << 16, ..limits });
    svm.merge_intercepts();
    assert_eq!(open(&svm), 0);
    // At the next VMRUN they are there, and the instructions are the CPU's.
    svm.vmcb_mut(Clean::empty()).control.exit_code = ExitCode::Invalid.0;
    assert_eq!(svm.reflect(&mut gprs, &block), Executed::Left);
    svm.vmcb_mut(Clean::empty()).control.exit_code = ExitCode::Vmrun.0;
    assert_eq!(svm.execute(&mut gprs, 3, &block), Executed::Entered);
    assert_eq!((open(&svm), svm.vmcb().control.virt_ext), (opens.bits(), 2));
    svm.merge_intercepts();
    assert_eq!(open(&svm), opens.bits());
}

/// AMD's CPUs keep 32 bits of the two, and a guest that was told of Intel's reads 64 (APM vol. 2 §6.1.2).
#[test]
fn a_guest_of_another_make_has_all_of_sysenters_addresses() {
    use backend::Msrs as _;
    const ALL: u64 = 0x1234_5678_9abc;
    let features = Features { asids: 8, npt: true, ..Features::default() };
    let _ = crate::percpu::set_up(features, 4);
    for wide in [true, false] {
        let mut svm = Svm::new(Counting::new(Model::default()), features).unwrap();
        svm.set_limits(GuestLimits { wide_sysenter: wide, ..GuestLimits::default() });
        svm.set_msr_filter(|_| Directions::empty());
        for index in [msr::SYSENTER_ESP, msr::SYSENTER_EIP] {
            let exits = svm.block.msr_map.intercepted(index);
            assert_eq!(exits, Directions::all().when(wide));
            svm.set_msr(index, ALL).unwrap();
        }
        // What the CPU makes of them.
        let save = &mut svm.vmcb_mut(Clean::empty()).save;
        (save.sysenter_esp, save.sysenter_eip) = (ALL & 0xffff_ffff, ALL & 0xffff_ffff);
        let told = if wide { ALL } else { ALL & 0xffff_ffff };
        assert_eq!((svm.msr(msr::SYSENTER_ESP), svm.msr(msr::SYSENTER_EIP)), (Ok(told), Ok(told)));
    }
}

/// What VMLOAD and VMSAVE move can neither be read nor set inside the loop, and all else that there is can.
#[test]
fn what_is_live_in_the_loop_is_not_accessed_there() {
    use backend::Msrs as _;
    let features = Features { asids: 8, npt: true, lbr: true, ..Features::default() };
    let _ = crate::percpu::set_up(features, 4);
    for v_spec_ctrl in [false, true] {
        let features = Features { v_spec_ctrl, ..features };
        let mut svm = Svm::new(Counting::new(Model::default()), features).unwrap();
        let all = || (0..0x2000).chain(0xc000_0000..0xc000_2000).chain(0xc001_0000..0xc001_2000);
        let known: alloc::vec::Vec<u32> = all().filter(|&index| svm.msr(index).is_ok()).collect();
        assert!(crate::msrs::LIVE.iter().all(|live| known.contains(live)));
        // As `load` has it: what a CPU's records keep is other tests'.
        svm.loaded = true;
        for index in known {
            let live = crate::msrs::LIVE.contains(&index);
            let value = svm.msr(index);
            assert_eq!(value.is_err(), live, "{index:#x}");
            // The one is the store's, and the records are set while branches are recorded.
            if !matches!(index, msr::VIRT_SPEC_CTRL | msr::LAST_BRANCH_FROM..=msr::LAST_INT_TO) {
                assert_eq!(svm.set_msr(index, value.unwrap_or(0)).is_err(), live, "{index:#x}");
            }
        }
        svm.loaded = false;
        assert!(crate::msrs::LIVE.iter().all(|&live| svm.msr(live).is_ok()));
    }
}
