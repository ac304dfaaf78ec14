//! The model CPU refuses what a real one faults on: for every instruction of the traits that has an
//! operand, a bad one is planted.

use std::panic::{AssertUnwindSafe, catch_unwind};

use backend::Gprs;
use gannet_cpu::{Cpu, Model, SpecCtrl, VmxCpu, VmxSwitch};
use x86::{
    Hpa, msr,
    vmcb::{Vmcb, event as svm_event},
    vmcs::{ProcControls2, event, field, invept},
};
use zerocopy::FromZeros;

/// What the model says to it; `None`: it takes it.
fn refusal(plant: impl FnOnce(&mut Model)) -> Option<String> {
    let mut model = Model::default();
    model.vmx.on.set(Some(Hpa(0x7000)));
    let refused = catch_unwind(AssertUnwindSafe(|| plant(&mut model))).err()?;
    let literal = refused.downcast_ref::<&str>().map(|said| said.to_string());
    refused.downcast_ref::<String>().cloned().or(literal)
}

#[track_caller]
fn refuses(why: &str, plant: impl FnOnce(&mut Model)) {
    let said = refusal(plant).expect("the model took it");
    assert!(said.contains(why), "{said}");
}

#[track_caller]
fn takes(what: impl FnOnce(&mut Model)) {
    assert_eq!(refusal(what), None);
}

#[test]
fn debug_registers() {
    refuses("DR6 has 32 bits", |c| c.set_debug_reg(6, 1 << 40));
    refuses("DR7 has 32 bits", |c| c.set_debug_reg(7, 1 << 32));
    refuses("no such register", |c| c.set_debug_reg(4, 0));
    refuses("no such register", |c| {
        let _ = c.debug_reg(8);
    });
    takes(|c| c.set_debug_reg(3, u64::MAX));
    takes(|c| c.set_debug_reg(6, 0xffff_4ff0));
}

#[test]
fn extended_control_registers() {
    for (why, value) in [
        ("x87", 0),
        ("AVX needs SSE", 0b101),
        ("MPX", 0b1011),
        ("AVX-512", 0xe3),
        ("AVX-512", 0x27),
        ("AMX", 1 << 18 | 3),
        ("lacks", 1 << 63 | 3),
    ] {
        refuses(why, |c| c.set_xcr0(value));
    }
    takes(|c| c.set_xcr0(0xe7));
}

#[test]
fn msrs() {
    const HOLE: u64 = 1 << 47;
    for index in [
        msr::LSTAR,
        msr::CSTAR,
        msr::FS_BASE,
        msr::GS_BASE,
        msr::KERNEL_GS_BASE,
        msr::SYSENTER_ESP,
        msr::SYSENTER_EIP,
    ] {
        refuses("canonical", |c| c.wrmsr(index, HOLE));
        takes(|c| c.wrmsr(index, 0xffff_8000_0000_0000));
    }
    for (index, value) in [
        (msr::SYSCALL_MASK, 1 << 32),
        (msr::TSC_AUX, 1 << 32),
        (msr::EFER, 1 << 1),
        (msr::SPEC_CTRL, 1 << 63),
        (msr::PRED_CMD, 1 << 1),
        (msr::FLUSH_CMD, 2),
        (msr::DEBUGCTL, 1 << 3),
        (msr::PAT, 2),
        (msr::XSS, 1),
        (msr::TSC_RATIO, 1 << 40),
        (msr::VM_HSAVE_PA, 0x1001),
    ] {
        refuses("refuses", |c| c.wrmsr(index, value));
    }
    refuses("no such MSR", |c| c.wrmsr(0x1234_5678, 0));
    refuses("no such MSR", |c| {
        let _ = c.rdmsr(0x1234_5678);
    });
    refuses("only be written", |c| {
        let _ = c.rdmsr(msr::PRED_CMD);
    });
    refuses("locked", |c| {
        c.limits.feature_control_locked = true;
        c.wrmsr(msr::FEATURE_CONTROL, 5);
    });
}

#[test]
fn pages() {
    for at in [Hpa(0x1008), Hpa(1 << 52)] {
        refuses("address", |c| c.vmload(at));
        refuses("address", |c| c.vmsave(at));
        refuses("address", |c| {
            let _ = c.vmxon(at);
        });
        refuses("address", |c| c.vmptrld(at));
        refuses("address", |c| c.vmclear(at));
    }
}

#[test]
fn outside_of_vmx_operation() {
    let instructions: [fn(&mut Model); 8] = [
        |c| c.vmxoff(),
        |c| c.vmptrld(Hpa(0x1000)),
        |c| c.vmclear(Hpa(0x1000)),
        |c| c.invept(invept::ALL, 0),
        |c| c.invvpid(2, 1, 0),
        |c| c.vmwrite(field::GUEST_CR4.encoding(), 0),
        |c| {
            let _ = c.vmread(field::GUEST_CR4.encoding());
        },
        |c| {
            c.vmx_enter(&mut Gprs::default(), &mut VmxSwitch::default());
        },
    ];
    for instruction in instructions {
        refuses("outside", |c| {
            c.vmptrld(Hpa(0x1000));
            c.vmx.on.set(None);
            instruction(c);
        });
    }
}

#[test]
fn flags() {
    refuses("STI", |c| c.sti());
    refuses("GIF", |c| {
        let mut block = a_block();
        c.vmrun(&mut block, Hpa(0x1000), &mut Gprs::default(), SpecCtrl::default());
    });
}

fn a_block() -> Box<Vmcb> {
    let mut block = Box::new(Vmcb::new_zeroed());
    block.save.efer = 1 << 12;
    block.control.asid = 1;
    block.control.intercepts[4] = 0x3f;
    block
}

fn vmrun(change: impl FnOnce(&mut Vmcb, &mut SpecCtrl)) -> impl FnOnce(&mut Model) {
    |c| {
        let (mut block, mut spec) = (a_block(), SpecCtrl::default());
        change(&mut block, &mut spec);
        c.clgi();
        c.then(|_, _| ());
        c.vmrun(&mut block, Hpa(0x1000), &mut Gprs::default(), spec);
    }
}

#[test]
fn the_control_block() {
    takes(vmrun(|_, _| ()));
    refuses("DR6", vmrun(|b, _| b.save.dr6 = 1 << 40));
    refuses("DR7", vmrun(|b, _| b.save.dr7 = 1 << 40));
    refuses("CR0", vmrun(|b, _| b.save.cr0 = 1 << 40));
    refuses("CR0", vmrun(|b, _| b.save.cr0 = 1 << 29));
    refuses("CR4", vmrun(|b, _| b.save.cr4 = 1 << 63));
    refuses("EFER", vmrun(|b, _| b.save.efer |= 2));
    refuses("SVME", vmrun(|b, _| b.save.efer = 0));
    refuses("ASID", vmrun(|b, _| b.control.asid = 0));
    refuses("VMRUN is not", vmrun(|b, _| b.control.intercepts[4] = 0));
    // VMLOAD, VMSAVE, STGI, CLGI.
    for (bit, why) in [(2, "physical"), (3, "physical"), (4, "flag"), (5, "flag")] {
        refuses(why, vmrun(move |b, _| b.control.intercepts[4] &= !(1 << bit)));
    }
    takes(vmrun(|b, _| (b.control.intercepts[4], b.control.virt_ext) = (0x33, 2)));
    takes(vmrun(|b, _| (b.control.intercepts[4], b.control.int_ctl) = (0xf, 1 << 25)));
    refuses("memory type", vmrun(|b, _| (b.control.np_ctl, b.save.g_pat) = (1, 2)));
    let nmi_as_exception = svm_event::VALID | svm_event::EXCEPTION | 2;
    refuses("vector", vmrun(|b, _| b.control.event_inj = nmi_as_exception));
    refuses("SPEC_CTRL", vmrun(|_, s| s.guest = 1 << 60));
}

fn vmx_entry(encoding: u32, value: u64) -> impl FnOnce(&mut Model) {
    move |c| {
        c.vmptrld(Hpa(0x1000));
        c.vmwrite(encoding, value);
        c.vmx.then(|_, _| ());
        c.vmx_enter(&mut Gprs::default(), &mut VmxSwitch::default());
    }
}

#[test]
fn the_fields_of_a_vmcs() {
    takes(vmx_entry(field::GUEST_DR7.encoding(), 0x402));
    for (encoding, value) in [
        (field::GUEST_DR7.encoding(), 1 << 32),
        (field::GUEST_CR0.encoding(), 1 << 32),
        (field::GUEST_CR4.encoding(), 1 << 63),
        (field::HOST_CR4.encoding(), 1 << 63),
        (field::GUEST_EFER.encoding(), 2),
        (field::HOST_EFER.encoding(), 2),
        (field::GUEST_PAT.encoding(), 2),
        (field::HOST_PAT.encoding(), 3),
        (field::HOST_GS_BASE.encoding(), 1 << 47),
        (field::GUEST_SYSENTER_EIP.encoding(), 1 << 47),
        (field::GUEST_DEBUGCTL.encoding(), 1 << 3),
        (field::GUEST_RFLAGS.encoding(), 0),
        (field::GUEST_RFLAGS.encoding(), 2 | 1 << 40),
        (field::ENTRY_INTERRUPTION.encoding(), (event::VALID | event::EXCEPTION | 40).into()),
        (field::ENTRY_INTERRUPTION.encoding(), (event::VALID | event::NMI | 3).into()),
    ] {
        refuses("refuses", vmx_entry(encoding, value));
    }
    refuses("read-only", vmx_entry(field::EXIT_REASON.encoding(), 0));
    refuses("not as wide", vmx_entry(field::VPID.encoding(), 1 << 16));
    refuses("SPEC_CTRL", |c| {
        c.vmptrld(Hpa(0x1000));
        let mut switch = VmxSwitch { guest_spec_ctrl: 1 << 60, ..VmxSwitch::default() };
        c.vmx_enter(&mut Gprs::default(), &mut switch);
    });
}

#[test]
fn invalidations() {
    refuses("kind", |c| c.invept(3, 0));
    refuses("kind", |c| c.invvpid(4, 1, 0));
    refuses("VPID 0", |c| c.invvpid(1, 0, 0));
    refuses("canonical", |c| c.invvpid(0, 1, 1 << 47));
}

/// Entries with these EPT pointers in turn; before one with `Some`, INVEPT of that kind and pointer.
fn runs_on(turns: &'static [(u64, Option<(u64, u64)>)]) -> impl FnOnce(&mut Model) {
    move |c| {
        c.vmptrld(Hpa(0x1000));
        c.vmwrite(field::PROC_CONTROLS2.encoding(), ProcControls2::EPT.bits().into());
        let mut switch = VmxSwitch::default();
        for &(pointer, forgets) in turns {
            c.vmwrite(field::EPT_POINTER.encoding(), pointer);
            if let Some((kind, pointer)) = forgets {
                c.invept(kind, pointer);
            }
            c.vmx.then(|_, _| {});
            assert!(c.vmx_enter(&mut Gprs::default(), &mut switch));
            switch.flags |= VmxSwitch::LAUNCHED;
        }
    }
}

#[test]
fn a_pointer_that_comes_back_is_forgotten_first() {
    const ONE: u64 = 0x501e;
    const OTHER: u64 = 0x601e;
    takes(runs_on(&[(ONE, None), (ONE, None)]));
    refuses("no INVEPT", runs_on(&[(ONE, None), (OTHER, None)]));
    const OF_ONE: Option<(u64, u64)> = Some((invept::SINGLE, ONE));
    const OF_OTHER: Option<(u64, u64)> = Some((invept::SINGLE, OTHER));
    const OF_ALL: Option<(u64, u64)> = Some((invept::ALL, 0));
    takes(runs_on(&[(ONE, None), (OTHER, OF_OTHER), (ONE, OF_ONE)]));
    takes(runs_on(&[(ONE, None), (OTHER, OF_ALL), (ONE, OF_ALL)]));
    // What was forgotten in the interlude was that of the interlude's pointer.
    refuses("no INVEPT", runs_on(&[(ONE, None), (OTHER, OF_OTHER), (ONE, None)]));
    refuses("no INVEPT", runs_on(&[(ONE, None), (OTHER, OF_OTHER), (ONE, OF_OTHER)]));
}

/// An entry on one CPU, then one on another, where `forgets` was forgotten.
fn moves(forgets: Option<(u64, u64)>) -> impl FnOnce(&mut Model) {
    move |c| {
        runs_on(&[(0x501e, None)])(c);
        c.vmx.come_to_another_cpu();
        if let Some((kind, pointer)) = forgets {
            c.invept(kind, pointer);
        }
        runs_on(&[(0x501e, None)])(c);
    }
}

#[test]
fn a_pointer_is_forgotten_where_the_vcpu_comes_to() {
    takes(moves(Some((invept::SINGLE, 0x501e))));
    takes(moves(Some((invept::ALL, 0))));
    refuses("no INVEPT of it there", moves(None));
    refuses("no INVEPT of it there", moves(Some((invept::SINGLE, 0x601e))));
}

/// One VMRUN of the block, and an exit.
fn run(c: &mut Model, block: &mut Vmcb) {
    c.gif = false;
    c.then(|_, _| {});
    c.vmrun(block, Hpa(0x1000), &mut Gprs::default(), SpecCtrl::default());
}

/// A guest with SYSCALL, and the host's LSTAR: by either kind of entry.
#[test]
fn syscall_that_leads_to_the_host() {
    let syscall = 0x501;
    for (efer, own) in [(syscall, false), (syscall, true), (0x500, false), (1, false)] {
        let plant = move |c: &mut Model| {
            if own {
                c.wrmsr(msr::LSTAR, 0x1234);
            }
            c.vmptrld(Hpa(0x1000));
            c.vmwrite(field::ENTRY_CONTROLS.encoding(), 1 << 15);
            c.vmwrite(field::GUEST_EFER.encoding(), efer);
            c.vmwrite(field::GUEST_RFLAGS.encoding(), 2);
            c.vmx.then(|_, _| {});
            c.vmx_enter(&mut Gprs::default(), &mut VmxSwitch::default());
        };
        if efer == syscall && !own {
            refuses("LSTAR the host's", plant);
        } else {
            takes(plant);
        }
    }
    refuses("LSTAR the host's", |c| {
        let mut block = a_block();
        block.save.efer = (x86::Efer::SVME | x86::Efer::SCE | x86::Efer::LMA).bits();
        run(c, &mut block);
    });
}

/// What a block calls clean the CPU takes from what it keeps of it.
#[test]
fn a_change_that_is_called_clean() {
    type Change = fn(&mut Vmcb);
    let changes: [(&str, u32, Change); 11] = [
        ("intercepts", 0, |b| b.control.tsc_offset = 1),
        ("maps", 1, |b| b.control.msrpm_base_pa = 0x5000),
        ("an ASID", 2, |b| b.control.asid = 2),
        ("virtual interrupts", 3, |b| b.control.int_vector = 1),
        ("nested paging", 4, |b| b.save.g_pat = 1),
        ("control registers", 5, |b| b.save.cr3 = 0x1000),
        ("debug registers", 6, |b| b.save.dr7 = 1),
        ("descriptor tables", 7, |b| b.save.segments[6].base = 1),
        ("segments", 8, |b| b.save.segments[1].base = 1),
        ("CR2", 9, |b| b.save.cr2 = 1),
        ("branch records", 10, |b| b.control.virt_ext = 1),
    ];
    for (what, bit, change) in changes {
        for clean in [1 << bit, !(1 << bit)] {
            let plant = move |c: &mut Model| {
                let mut block = a_block();
                run(c, &mut block);
                change(&mut block);
                block.control.clean = clean;
                run(c, &mut block);
            };
            if clean == 1 << bit { refuses(&format!("{what}, clean"), plant) } else { takes(plant) }
        }
    }
}
