//! A guest that runs a guest of its own by SVM, and what user space does to the two.

mod rig;

use std::sync::atomic::Ordering;

use gannet_vcpu::{By, UserExit};
use rig::nested::{BLOCK, Hypervisor, L2_RIP};
use rig::{exit, shutdown};
use stats::VcpuCount;
use x86::vmcb::ExitCode;
use x86::{Cr0, Cr4, Efer, msr};

#[test]
fn a_reset_by_user_space_while_l2_runs_sets_every_register() {
    let mut machine = Hypervisor::new(false);
    machine.stop_in_l2();
    let mut sregs = machine.vcpu.sregs();
    (sregs.cr0, sregs.cr4, sregs.efer) = (Cr0::CD_NW | Cr0::ET, Cr4::empty(), Efer::empty());
    (sregs.cs.selector, sregs.cs.base, sregs.cs.attr) = (0xf000, 0xffff_0000, 0x9b);
    (sregs.ss.base, sregs.gs.base) = (0x1230, 0x4560);
    (sregs.idt.base, sregs.idt.limit) = (0, 0x3ff);
    (sregs.gdt.base, sregs.gdt.limit) = (0x10, 0xffff);
    machine.vcpu.set_sregs(&sregs, None).unwrap();
    assert_eq!(machine.vcpu.sregs(), sregs);
    // L1 runs with them.
    machine.then(|vmcb, gprs| {
        assert_eq!(vmcb.save.segments[x86::vmcb::SEG_CS].base, 0xffff_0000);
        shutdown(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Shutdown);
}

#[test]
fn runs_of_a_guests_guest_are_counted_and_seen() {
    let mut machine = Hypervisor::new(false);
    let shared = machine.vcpu.shared().clone();
    let seen = || [VcpuCount::NestedRun, VcpuCount::GuestMode].map(|what| shared.stats.get(what));
    assert_eq!(seen(), [0, 0]);
    // L1 asks for CPUID. A block that is refused is no run.
    machine.put(BLOCK + 0x08, 1 << (32 + 18));
    machine.vmrun();
    machine.then(|vmcb, gprs| exit(ExitCode::Cpuid)(vmcb, gprs));
    machine.then(|vmcb, gprs| exit(ExitCode::Hlt)(vmcb, gprs));
    assert_eq!((machine.run(), seen()), (UserExit::Hlt, [1, 0]));
    machine.stop_in_l2();
    assert_eq!(seen(), [2, 1], "stopped in L2");
    machine.put(BLOCK + 0x58, 0);
    machine.then(|vmcb, gprs| exit(ExitCode::Cpuid)(vmcb, gprs));
    machine.vmrun();
    machine.then(|vmcb, gprs| exit(ExitCode::Hlt)(vmcb, gprs));
    assert_eq!((machine.run(), seen()), (UserExit::Hlt, [2, 0]));
    // Without an exit of L2's.
    for (at, value) in [(0x58, 1), (0x578, L2_RIP)] {
        machine.put(BLOCK + at, value);
    }
    machine.stop_in_l2();
    assert_eq!(seen(), [3, 1]);
    let mut sregs = machine.vcpu.sregs();
    sregs.efer -= Efer::SVME;
    machine.vcpu.set_sregs(&sregs, None).unwrap();
    assert_eq!(seen(), [3, 0], "L2 was abandoned");
}

#[test]
fn registers_that_user_space_sets_before_it_ends_l2_stay() {
    let mut machine = Hypervisor::new(false);
    machine.stop_in_l2();
    let mut regs = machine.vcpu.regs();
    regs.gpr = core::array::from_fn(|n| 0x100 + n as u64);
    regs.rip = 0xfff0;
    regs.rflags |= x86::Rflags::from_bits_retain(0x41);
    machine.vcpu.set_regs(&regs);
    let mut sregs = machine.vcpu.sregs();
    (sregs.cr0, sregs.efer) = (Cr0::CD_NW | Cr0::ET, Efer::empty());
    sregs.cs.attr = 0x9b;
    machine.vcpu.set_sregs(&sregs, None).unwrap();
    assert_eq!(machine.vcpu.regs(), regs);
}

#[test]
fn efer_that_user_space_sets_has_the_lma_of_l1() {
    let mut machine = Hypervisor::new(false);
    const BLOCK: u64 = rig::nested::BLOCK;
    // L2 is in real mode.
    for (at, value) in [(0x4d0, Efer::SVME.bits()), (0x558, 0x10), (0x548, 0)] {
        machine.put(BLOCK + at, value);
    }
    machine.put(BLOCK + 0x410, 0x0000_ffff_009b_0000);
    machine.stop_in_l2();
    assert!(!machine.vcpu.sregs().efer.contains(Efer::LMA));
    machine.vcpu.write_msr(msr::EFER, Efer::LME.bits(), By::Vmm).unwrap();
    assert_eq!(machine.vcpu.sregs().efer, Efer::LME | Efer::LMA);
    assert!(machine.vcpu.sregs().cr0.contains(Cr0::PG));
}

/// What becomes of an SMI that is taken: the VM has no system-management memory.
const TAKEN: UserExit = UserExit::Dead;

#[test]
fn an_smi_is_taken_once_svm_is_off_whatever_gif_was() {
    let mut machine = Hypervisor::new(true);
    machine.then(exit(ExitCode::Clgi));
    machine.then(shutdown);
    assert_eq!(machine.run(), UserExit::Shutdown);
    // A shutdown resets the vCPU, and sets GIF by that.
    machine.vcpu.queue_smi();
    machine.then(shutdown);
    assert_eq!(machine.run(), TAKEN);
}

#[test]
fn an_smi_is_taken_once_efer_has_lost_svme() {
    let mut machine = Hypervisor::new(false);
    machine.then(exit(ExitCode::Clgi));
    machine.then(exit(ExitCode::Hlt));
    assert_eq!(machine.run(), UserExit::Hlt);
    let efer = machine.vcpu.sregs().efer - Efer::SVME;
    machine.vcpu.write_msr(msr::EFER, efer.bits(), By::Vmm).unwrap();
    machine.vcpu.queue_smi();
    machine.then(shutdown);
    assert_eq!(machine.run(), TAKEN);
}

#[test]
fn what_l2_was_doing_goes_on_when_user_space_writes_its_registers_back() {
    let mut machine = Hypervisor::new(false);
    machine.stop_in_l2();
    let (regs, sregs) = (machine.vcpu.regs(), machine.vcpu.sregs());
    machine.vcpu.set_sregs(&sregs, None).unwrap();
    machine.vcpu.set_regs(&regs);
    machine.then(|vmcb, gprs| {
        assert_eq!(vmcb.save.rip, L2_RIP + 2);
        exit(ExitCode::Hlt)(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Hlt);
}

/// Tables of L1's: a root, two levels, and the leaves of the first 2 MiB.
const TABLES: u64 = 0x1_0000;
const LEAVES: u64 = TABLES + 0x3000;
/// A page that L1's tables do not map, and one that they lead elsewhere.
const ABSENT: u64 = 0x2_0000;
const MOVED: u64 = 0x2_1000;
const NPF_FINAL: u64 = 1 << 32;

/// L1 has tables of its own for L2, in which all but two pages lead to themselves.
fn with_tables(irqchip: bool) -> Hypervisor {
    let machine = Hypervisor::new(irqchip);
    for level in 0..3 {
        machine.put(TABLES + level * 0x1000, (TABLES + (level + 1) * 0x1000) | 7);
    }
    for page in 0..64 {
        machine.put(LEAVES + page * 8, page << 12 | 7);
    }
    machine.put(LEAVES + (ABSENT >> 12) * 8, 0);
    machine.put(LEAVES + (MOVED >> 12) * 8, 0x3_0000 | 7);
    machine.put(rig::nested::BLOCK + 0x90, 1);
    machine.put(rig::nested::BLOCK + 0xb0, TABLES);
    machine
}

/// A fault of L2's at `at`; a user's, as every one is.
fn npf(at: u64, code: u64) -> impl FnMut(&mut x86::vmcb::Vmcb, &mut backend::Gprs) + Send {
    move |vmcb, gprs| {
        exit(ExitCode::Npf)(vmcb, gprs);
        (vmcb.control.exit_info_1, vmcb.control.exit_info_2) = (NPF_FINAL | 4 | code, at);
    }
}

#[test]
fn l2_with_tables_of_l1_has_a_root_of_its_own() {
    let mut machine = with_tables(false);
    let root = std::sync::Arc::new(std::sync::atomic::AtomicU64::new(0));
    let of_l1 = root.clone();
    machine.then(move |vmcb, gprs| {
        of_l1.store(vmcb.control.ncr3, std::sync::atomic::Ordering::Relaxed);
        rig::nested::vmrun(vmcb, gprs);
    });
    machine.then(npf(MOVED, 2));
    machine.then(move |vmcb, gprs| {
        let l1 = root.load(std::sync::atomic::Ordering::Relaxed);
        assert!(vmcb.control.ncr3 != l1 && vmcb.control.ncr3 != 0 && l1 != 0);
        assert_eq!(vmcb.save.rip, L2_RIP);
        exit(ExitCode::Hlt)(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Hlt);
    let bits = machine.get(LEAVES + (MOVED >> 12) * 8) & 0x60;
    assert_eq!(bits, 0x60, "accessed and dirty");
}

#[test]
fn what_the_tables_of_l1_refuse_is_told_to_l1() {
    let mut machine = with_tables(false);
    machine.vmrun();
    machine.then(npf(ABSENT + 8, 2));
    machine.then(|vmcb, gprs| {
        assert_eq!(vmcb.save.rip, rig::nested::L1_RIP + 3);
        exit(ExitCode::Hlt)(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Hlt);
    let told = |at| machine.get(rig::nested::BLOCK + at);
    assert_eq!((told(0x70), told(0x78), told(0x80)), (0x400, NPF_FINAL | 6, ABSENT + 8));
}

/// A fault tells of a fetch where that can be forbidden: by EFER.NXE or CR4.SMEP of L1's.
#[test]
fn a_fetch_is_told_where_l1_has_nx_or_smep() {
    for (cr4, efer, told) in [
        (Cr4::empty(), Efer::NXE, 16),
        (Cr4::SMEP, Efer::empty(), 16),
        (Cr4::empty(), Efer::empty(), 0),
    ] {
        let mut machine = with_tables(false);
        let mut sregs = machine.vcpu.sregs();
        (sregs.cr4, sregs.efer) = (sregs.cr4 | cr4, sregs.efer | efer);
        machine.vcpu.set_sregs(&sregs, None).unwrap();
        machine.vmrun();
        machine.then(npf(ABSENT, 16));
        machine.then(exit(ExitCode::Hlt));
        assert_eq!(machine.run(), UserExit::Hlt);
        let info = machine.get(rig::nested::BLOCK + 0x78);
        assert_eq!(info, NPF_FINAL | 4 | told);
    }
}

#[test]
fn a_withdrawal_flushes_l2s_translations_and_l1s() {
    let mut machine = with_tables(false);
    machine.stop_in_l2();
    machine.vcpu.shared().request(vm::vcpu_shared::Request::FlushTlb);
    machine.then(|vmcb, gprs| {
        assert_eq!(vmcb.control.tlb_ctl, 3);
        npf(ABSENT, 0)(vmcb, gprs);
    });
    machine.then(|vmcb, gprs| {
        assert_eq!(vmcb.control.tlb_ctl, 3);
        exit(ExitCode::Hlt)(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Hlt);
}

/// TLB_CONTROL 1 is about all ids: L1's own translations go, too. Another command is about L2's.
#[test]
fn a_flush_of_all_ids_is_one_of_l1s_too() {
    for (command, wanted) in [(1, 3), (3, 0)] {
        let mut machine = with_tables(false);
        let word = machine.get(rig::nested::BLOCK + 0x58);
        machine.put(rig::nested::BLOCK + 0x58, word | command << 32);
        // VMRUN, and VMMCALL, which ends L2's run.
        machine.put(rig::nested::BLOCK + 0x10, 3);
        machine.vmrun();
        machine.then(exit(ExitCode::Vmmcall));
        machine.then(move |vmcb, gprs| {
            assert_eq!(vmcb.control.tlb_ctl, wanted);
            exit(ExitCode::Hlt)(vmcb, gprs);
        });
        assert_eq!(machine.run(), UserExit::Hlt);
    }
}

#[test]
fn user_space_is_told_where_l1s_tables_lead() {
    let mut machine = with_tables(false);
    // L2 without paging of its own.
    for (at, value) in [(0x4d0, Efer::SVME.bits()), (0x558, 0x10), (0x548, 0)] {
        machine.put(rig::nested::BLOCK + at, value);
    }
    machine.put(rig::nested::BLOCK + 0x410, 0x0000_ffff_009b_0000);
    machine.stop_in_l2();
    let mut state = vec![0; machine.vcpu.nested_state_size().unwrap()];
    machine.vcpu.nested_state(&mut state).unwrap();
    // And on a vCPU that was restored and has entered nobody yet.
    let mut other = with_tables(false);
    other.vcpu.set_sregs(&machine.vcpu.sregs(), None).unwrap();
    other.vcpu.set_nested_state(&state).unwrap();
    for machine in [&mut machine, &mut other] {
        assert_eq!(machine.vcpu.translate_address(MOVED + 4), Some((0x3_0004, true, true)));
        assert_eq!(machine.vcpu.translate_address(ABSENT), None);
    }
}

#[test]
fn tables_need_an_l1_in_long_mode_and_a_pat_that_exists() {
    let mut machine = with_tables(false);
    machine.put(rig::nested::BLOCK + 0x668, 2);
    machine.vmrun();
    machine.then(exit(ExitCode::Hlt));
    assert_eq!(machine.run(), UserExit::Hlt);
    assert_eq!(machine.get(rig::nested::BLOCK + 0x70), u64::MAX);
}

/// L1's VMLOAD and VMSAVE may be the CPU's to carry out: the fault is then that of an access.
#[test]
fn a_vmload_of_no_memory_is_told_to_user_space_and_no_access_to_a_device() {
    use rig::nested::{L1_RIP, L1_ROOT};
    for (code, write) in [(0x00da_010f, 0), (0x00db_010f, 2)] {
        let mut machine = Hypervisor::new(false);
        for (at, entry) in [(L1_ROOT, 0x4003), (0x4000, 0x5003), (0x5000, 0x83)] {
            machine.put(at, entry);
        }
        machine.put(L1_RIP, code);
        let mut npf = npf(0xd000_0000, write);
        machine.then(move |vmcb, gprs| {
            npf(vmcb, gprs);
            vmcb.save.rax = 0xd000_0000;
        });
        assert_eq!(machine.run(), UserExit::InternalError { suberror: 1 }, "{code:x}");
        // It is executed again, and nothing else has become of it.
        machine.then(move |vmcb, gprs| {
            assert_eq!(vmcb.save.rip, L1_RIP);
            shutdown(vmcb, gprs);
        });
        assert_eq!(machine.run(), UserExit::Shutdown);
        assert_eq!(machine.vcpu.backend().cpu().inner().injected, 0, "{code:x}");
    }
}

/// An access to a device whose instruction another vCPU has made VMLOAD meanwhile: a program of the guest's stops no VM by it.
#[test]
fn a_program_that_shows_vmload_for_its_access_hurts_itself_alone() {
    use rig::nested::{L1_RIP, L1_ROOT};
    const GP: u64 = 1 << 31 | 1 << 11 | 3 << 8 | 13;
    // Its privilege, RAX, and whether it is a hypervisor's.
    for (cpl, rax, svme) in [(3, 0xd000_0000, true), (0, 0x1000, true), (0, 0xd000_0000, false)] {
        let mut machine = Hypervisor::new(false);
        // For programs too.
        for (at, entry) in [(L1_ROOT, 0x4007), (0x4000, 0x5007), (0x5000, 0x87)] {
            machine.put(at, entry);
        }
        machine.put(L1_RIP, 0x00da_010f);
        if !svme {
            let mut sregs = machine.vcpu.sregs();
            sregs.efer -= Efer::SVME;
            machine.vcpu.set_sregs(&sregs, None).unwrap();
        }
        let mut npf = npf(0xd000_0000, 0);
        machine.then(move |vmcb, gprs| {
            npf(vmcb, gprs);
            (vmcb.save.cpl, vmcb.save.rax) = (cpl, rax);
        });
        machine.then(shutdown);
        assert_eq!(machine.run(), UserExit::Shutdown, "{cpl} {rax:x} {svme}");
        assert_eq!(machine.vcpu.backend().cpu().inner().injected, GP, "{cpl} {rax:x} {svme}");
    }
}

/// A block at an address that exists and is no memory is the VMM's doing, which hears of it; one at no address is #GP.
#[test]
fn a_block_that_is_no_memory_is_told_to_user_space() {
    use rig::nested::L1_RIP;
    const GP: u64 = 1 << 31 | 1 << 11 | 3 << 8 | 13;
    for code in [ExitCode::Vmrun, ExitCode::Vmload, ExitCode::Vmsave] {
        for (address, told) in [(0x4000_0000, true), (0x4000_0008, false), (1 << 60, false)] {
            let mut machine = Hypervisor::new(false);
            machine.then(move |vmcb, gprs| {
                exit(code)(vmcb, gprs);
                (vmcb.save.rax, vmcb.save.rip) = (address, L1_RIP);
                vmcb.control.next_rip = L1_RIP + 3;
            });
            if told {
                assert_eq!(machine.run(), UserExit::InternalError { suberror: 1 }, "{code:?}");
            }
            machine.then(move |vmcb, gprs| {
                assert_eq!(vmcb.save.rip, L1_RIP);
                shutdown(vmcb, gprs);
            });
            assert_eq!(machine.run(), UserExit::Shutdown);
            let injected = machine.vcpu.backend().cpu().inner().injected;
            assert_eq!(injected, if told { 0 } else { GP }, "{code:?} {address:x}");
        }
    }
}

/// An instruction at the end of a page is fetched without the next page, which L1's tables do not map; one that goes on
/// there is not.
#[test]
fn code_at_the_end_of_a_page_is_not_fetched_beyond() {
    const LAST: u64 = 0x9ffe;
    // MOV [RAX], ECX, whole; and its beginning alone, with a displacement to come.
    for (code, whole) in [(0x0889, true), (0x8889, false)] {
        let mut machine = with_tables(false);
        // L2's own tables: 2 MiB at their own addresses, and the device's.
        for (at, entry) in [(0x2000, 0x3027), (0x3000, 0x4027), (0x4000, 0xe7)] {
            machine.put(at, entry);
        }
        machine.put(LEAVES + 0xa * 8, 0);
        machine.put(LEAVES + (ABSENT >> 12) * 8, 0xd000_0000 | 7);
        machine.put(LAST & !7, code << 48);
        machine.put(rig::nested::BLOCK + 0x578, LAST);
        machine.vmrun();
        machine.then(|vmcb, gprs| {
            npf(ABSENT, 2)(vmcb, gprs);
            vmcb.save.rax = ABSENT;
            gprs.0[backend::RAX] = ABSENT;
        });
        let l1 = rig::nested::L1_RIP + 3;
        machine.then(move |vmcb, gprs| {
            assert_eq!(vmcb.save.rip, if whole { LAST + 2 } else { l1 });
            exit(ExitCode::Hlt)(vmcb, gprs);
        });
        if whole {
            assert!(matches!(machine.run(), UserExit::Mmio { .. }));
        }
        assert_eq!(machine.run(), UserExit::Hlt);
        if !whole {
            assert_eq!(machine.get(rig::nested::BLOCK + 0x80), 0xa000, "the page of its end");
        }
    }
}

/// A second page that L1's tables do not map.
const MISSING: u64 = 0x2_2000;
const RBP: usize = 5;

/// L2 has `code` at its beginning, and L1 has given it a device at [`ABSENT`].
fn with_device(code: u64) -> Hypervisor {
    let mut machine = with_tables(false);
    // L2's own tables: 2 MiB at their own addresses.
    for (at, entry) in [(0x2000, 0x3027), (0x3000, 0x4027), (0x4000, 0xe7)] {
        machine.put(at, entry);
    }
    machine.put(LEAVES + (ABSENT >> 12) * 8, 0xd000_0000 | 7);
    machine.put(LEAVES + (MISSING >> 12) * 8, 0);
    machine.put(L2_RIP, code);
    machine.vmrun();
    machine
}

/// ENTER has stored to a device, and L1's tables refuse the old frame: L1 hears of it, and no KVM_RUN ends for it again and
/// again.
#[test]
fn a_refusal_behind_a_store_to_a_device_ends_the_instruction() {
    let mut machine = with_device(0x0200_00c8); // enter 0, 2
    machine.then(|vmcb, gprs| {
        npf(ABSENT + 0x7f8, 2)(vmcb, gprs);
        (vmcb.save.rsp, gprs.0[RBP]) = (ABSENT + 0x800, MISSING + 0x100);
    });
    machine.then(|vmcb, gprs| {
        assert_eq!(vmcb.save.rip, rig::nested::L1_RIP + 3);
        exit(ExitCode::Hlt)(vmcb, gprs);
    });
    let asked = machine.run();
    assert!(matches!(asked, UserExit::Mmio { gpa: 0xd000_07f8, write: true, .. }), "{asked:?}");
    assert_eq!(machine.run(), UserExit::Hlt);
    let told = |at| machine.get(rig::nested::BLOCK + at);
    assert_eq!((told(0x70), told(0x78), told(0x80)), (0x400, NPF_FINAL | 4, MISSING + 0xf8));
    assert_eq!(told(0x578), L2_RIP);
}

/// L1's tables refuse what software accesses for L2. As behind a fault of the hardware's, L1 may lead the page elsewhere without a flush,
/// whether L2 has used it before or not.
#[test]
fn what_software_was_refused_is_looked_at_again() {
    const OTHER: u64 = 0x3_0000;
    for used in [false, true] {
        let mut machine = with_device(0x0200_00c8); // enter 0, 2
        let entry = LEAVES + (MISSING >> 12) * 8;
        machine.then(npf(OTHER, 2));
        if used {
            machine.put(entry, 0x3_1000 | 0x67);
            machine.then(npf(MISSING, 0));
        }
        machine.then(|vmcb, gprs| {
            npf(ABSENT + 0x7f8, 2)(vmcb, gprs);
            (vmcb.save.rsp, gprs.0[RBP]) = (ABSENT + 0x800, MISSING + 0x100);
        });
        assert!(matches!(machine.run(), UserExit::Mmio { .. }));
        machine.put(entry, 0);
        machine.then(exit(ExitCode::Hlt));
        assert_eq!(machine.run(), UserExit::Hlt);
        assert_eq!(machine.get(rig::nested::BLOCK + 0x80), MISSING + 0xf8);
        machine.put(entry, OTHER | 0x67);
        let made = |machine: &Hypervisor| {
            let memory = machine.vm.memory();
            memory.nested().unwrap().counters().ahead.load(Ordering::Relaxed)
        };
        let before = made(&machine);
        machine.vmrun();
        machine.then(|vmcb, gprs| {
            assert_eq!(vmcb.control.tlb_ctl, 3);
            exit(ExitCode::Hlt)(vmcb, gprs);
        });
        assert_eq!(machine.run(), UserExit::Hlt);
        assert_eq!(made(&machine) - before, 1, "used: {used}");
    }
}

/// The half of a store that a device has is done: that L1's tables lead nowhere by then is nothing to tell L1 of.
#[test]
fn a_refusal_of_what_is_stored_already_is_forgotten() {
    let mut machine = with_device(0x50); // push rax
    machine.then(|vmcb, gprs| {
        npf(ABSENT + 0xffc, 2)(vmcb, gprs);
        (vmcb.save.rsp, vmcb.save.rax) = (ABSENT + 0x1004, 0x1234_5678_9abc_def0);
    });
    let asked = machine.run();
    assert!(matches!(asked, UserExit::Mmio { gpa: 0xd000_0ffc, len: 4, .. }), "{asked:?}");
    machine.put(LEAVES + (ABSENT >> 12) * 8, 0);
    machine.then(|vmcb, gprs| {
        assert_eq!((vmcb.save.rip, vmcb.save.rsp), (L2_RIP + 1, ABSENT + 0xffc));
        exit(ExitCode::Hlt)(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Hlt);
    assert_eq!(machine.get(0x3_0000), 0x1234_5678);
}

#[test]
fn an_exception_that_l1_asked_for_comes_to_it_without_a_word_of_the_kernels() {
    let mut machine = Hypervisor::new(false);
    const INTERCEPTS: u64 = rig::nested::BLOCK + 8;
    const UD: ExitCode = ExitCode(0x46);
    machine.put(INTERCEPTS, machine.get(INTERCEPTS) | 1 << 6);
    machine.vmrun();
    machine.then(exit(UD));
    // The port refuses to be asked about split locks while the guest's GS base is loaded.
    machine.then(|vmcb, gprs| {
        assert_ne!(vmcb.save.rip, L2_RIP, "L1 runs");
        shutdown(vmcb, gprs);
    });
    assert_eq!(machine.run(), UserExit::Shutdown);
    assert_eq!(machine.get(rig::nested::BLOCK + 0x70), UD.0);
}

/// What L1 is told of L2's access through tables whose first entry has bit 8, which AMD's CPUs and Hygon's reserve, where CPUID
/// names `vendor`; by its words in EBX, EDX and ECX.
fn told_of_bit_8(vendor: [u32; 3]) -> u64 {
    const TABLES: u64 = 0x1_0000;
    const FINAL_WRITE: u64 = 1 << 32 | 6;
    let mut machine = Hypervisor::new(false);
    let mut cpuid = rig::nested::offered().cpuid.entries().to_vec();
    for entry in cpuid.iter_mut().filter(|entry| entry.leaf == 0) {
        [entry.ebx, entry.edx, entry.ecx] = vendor;
    }
    machine.vcpu.set_cpuid(&cpuid).unwrap();
    machine.put(BLOCK + 0x90, 1);
    machine.put(BLOCK + 0xb0, TABLES);
    machine.put(TABLES, (TABLES + 0x1000) | 7 | 1 << 8);
    machine.vmrun();
    machine.then(|vmcb, gprs| {
        exit(ExitCode::Npf)(vmcb, gprs);
        (vmcb.control.exit_info_1, vmcb.control.exit_info_2) = (FINAL_WRITE, 0x2_0000);
    });
    machine.then(shutdown);
    assert_eq!(machine.run(), UserExit::Shutdown);
    assert_eq!(machine.get(BLOCK + 0x70), ExitCode::Npf.0);
    machine.get(BLOCK + 0x78)
}

#[test]
fn hygons_cpus_reserve_in_l1s_tables_what_amds_reserve() {
    const RESERVED: u64 = 1 << 3 | 1;
    let amd = told_of_bit_8([0x6874_7541, 0x6974_6e65, 0x444d_4163]);
    let hygon = told_of_bit_8([0x6f67_7948, 0x6e65_476e, 0x656e_6975]);
    assert_eq!(amd & RESERVED, RESERVED);
    assert_eq!(hygon, amd);
}
