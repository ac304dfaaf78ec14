//! The bytes at RIP are read after an exit, and another CPU of the guest may have changed them by then: a
//! program gets by that nothing that it may not have (CVE-2010-0306), and an access that user space has
//! answered completes the instruction that made it.

mod rig;

use core::sync::atomic::Ordering::Relaxed;

use ::vm::VmRef;
use backend::{Gprs, RBX, RCX, RDI, RDX, RSI};
use gannet_vcpu::{RunInput, UserExit};
use host::page::Page;
use mmu::Region;
use rig::{Machine, TestVcpu, add_vcpu, vm};
use svm::Features;
use x86::Rflags;
use x86::vmcb::{ExitCode, Vmcb};

const CODE: u64 = 0xf000;
const DEVICE: u64 = 0xd000_0000;
const PORT: u16 = 0x99;
/// An exit code that nobody knows: the run ends, and the registers stay.
const UNKNOWN: u64 = 0x3ff;

struct Guest {
    vcpu: TestVcpu,
    code: &'static Page,
    vm: VmRef,
}

fn guest(code: &[u8]) -> Guest {
    guest_of(&Machine::default(), code)
}

fn guest_of(machine: &Machine, code: &[u8]) -> Guest {
    let vm = vm(machine);
    let page = Box::leak(Box::new(Page::zeroed().unwrap()));
    let region = Region { slot: 0, flags: 0, gpa: CODE, size: 0x1000, hva: page.hpa().0 };
    vm.memory().set_region(&region, &**vm).unwrap();
    let mut vcpu = add_vcpu(machine, &vm, 0);
    // Protected mode without paging: level 3, IOPL 0, and a TSS without a bitmap.
    let mut sregs = vcpu.sregs();
    sregs.cr0 = x86::Cr0::from_bits_retain(0x31);
    sregs.cs.attr = 0xcfb;
    sregs.cs.base = 0;
    sregs.cs.limit = u32::MAX;
    for data in [&mut sregs.ds, &mut sregs.es, &mut sregs.ss] {
        data.attr = 0xcf3;
        data.limit = u32::MAX;
    }
    sregs.tr.attr = 0x8b;
    sregs.tr.limit = 0x66;
    vcpu.set_sregs(&sregs, None).unwrap();
    let guest = Guest { vcpu, code: page, vm };
    guest.place(code);
    guest
}

impl Guest {
    fn place(&self, code: &[u8]) {
        for (to, from) in self.code.bytes().iter().zip(code) {
            to.store(*from, Relaxed);
        }
    }

    fn then(&mut self, step: impl FnMut(&mut Vmcb, &mut Gprs) + Send + 'static) {
        self.vcpu.backend().cpu().inner().then(step);
    }

    fn run(&mut self) -> UserExit {
        self.vcpu.run(&RunInput { mmio_data: [5; 8], ..RunInput::default() })
    }

    /// The guest's code is read inside the loop from now on.
    fn touch_code(&mut self) {
        self.then(|vmcb, _| {
            vmcb.control.exit_code = ExitCode::Npf.0;
            vmcb.control.exit_info_1 = (1 << 32) | 2;
            vmcb.control.exit_info_2 = CODE;
        });
    }

    /// What the last entry injected.
    fn injected(&mut self) -> u64 {
        self.vcpu.backend().cpu().inner().injected
    }

    /// The next entry, of which `look` sees the control block, is the last.
    fn ends(&mut self, mut look: impl FnMut(&Vmcb, &Gprs) + Send + 'static) {
        self.then(move |vmcb, gprs| {
            look(vmcb, gprs);
            vmcb.control.exit_code = UNKNOWN;
        });
        assert!(matches!(self.run(), UserExit::InternalError { suberror: 4, .. }));
        assert_eq!(self.vcpu.backend().cpu().inner().steps_left(), 0);
    }
}

/// A fault on the device's page.
fn device(write: bool) -> impl Fn(&mut Vmcb, &mut Gprs) + Send + Clone + 'static {
    move |vmcb, gprs| {
        gprs.0[RBX] = DEVICE;
        gprs.0[RDX] = PORT.into();
        vmcb.save.rip = CODE;
        vmcb.control.exit_code = ExitCode::Npf.0;
        vmcb.control.exit_info_1 = (1 << 32) | u64::from(write) << 1;
        vmcb.control.exit_info_2 = DEVICE;
        vmcb.control.insn_len = 0;
    }
}

fn port(input: bool) -> impl Fn(&mut Vmcb, &mut Gprs) + Send + Clone + 'static {
    move |vmcb, gprs| {
        (gprs.0[RCX], gprs.0[RDX], gprs.0[RSI]) = (1, PORT.into(), CODE);
        vmcb.save.rip = CODE;
        vmcb.control.exit_code = ExitCode::Ioio.0;
        vmcb.control.exit_info_1 = u64::from(PORT) << 16 | 1 << 4 | 1 << 2 | u64::from(input);
    }
}

impl Guest {
    /// At the guest-physical address `gpa`, in a slot of its own.
    fn memory(&self, slot: u32, flags: u32, gpa: u64) -> &'static Page {
        let page = Box::leak(Box::new(Page::zeroed().unwrap()));
        let region = Region { slot, flags, gpa, size: 0x1000, hva: page.hpa().0 };
        self.vm.memory().set_region(&region, &**self.vm).unwrap();
        page
    }

    fn delete(&self, slot: u32) {
        let gone = Region { slot, flags: 0, gpa: 0, size: 0, hva: 0 };
        self.vm.memory().set_region(&gone, &**self.vm).unwrap();
    }

    /// Code that may access ports.
    fn privileged(&mut self) {
        let mut sregs = self.vcpu.sregs();
        (sregs.cs.attr, sregs.ss.attr) = (0xc9b, 0xc93);
        self.vcpu.set_sregs(&sregs, None).unwrap();
    }
}

const GP: u64 = 1 << 31 | 1 << 11 | 3 << 8 | 13;

#[test]
fn bytes_that_came_after_a_device_access_reach_no_port() {
    // OUT DX, AL; OUT 0x99, EAX; IN AL, DX; MOV CR0, EAX; CLTS; a load where a store was.
    let swapped: [&[u8]; 6] =
        [&[0xee], &[0xe7, 0x99], &[0xec], &[0x0f, 0x22, 0xc0], &[0x0f, 0x06], &[0x03, 0x03]];
    for code in swapped {
        let mut guest = guest(code);
        guest.then(device(true));
        // The guest runs on where it was, with nothing injected.
        guest.ends(move |vmcb, _| {
            assert_eq!(vmcb.save.rip, CODE, "{code:02x?}");
        });
        assert_eq!(guest.injected(), 0, "{code:02x?}");
    }
}

#[test]
fn a_load_does_not_become_a_store() {
    // The second access to a page is decoded inside the loop.
    for code in [&[0x89, 0x03][..], &[0xc7, 0x03, 1, 0, 0, 0], &[0x50]] {
        let mut guest = guest(&[0x8b, 0x03]);
        guest.then(device(false));
        assert!(matches!(guest.run(), UserExit::Mmio { write: false, .. }));
        guest.place(code);
        guest.then(device(false));
        guest.ends(move |vmcb, _| assert_eq!(vmcb.save.rip, CODE, "{code:02x?}"));
    }
}

/// SMSW of a program is no privileged instruction and leads to the exit of a CR0 read.
#[test]
fn bytes_that_came_after_smsw_read_no_control_register() {
    const SECRET: u64 = 0x0dea_d000;
    // MOV EAX from CR3, CR2, CR4, CR0; MOV EAX, DR7; MOV CR3, EAX.
    let swapped: [&[u8]; 6] = [
        &[0x0f, 0x20, 0xd8],
        &[0x0f, 0x20, 0xd0],
        &[0x0f, 0x20, 0xe0],
        &[0x0f, 0x20, 0xc0],
        &[0x0f, 0x21, 0xf8],
        &[0x0f, 0x22, 0xd8],
    ];
    for code in swapped {
        // Whether the CPU tells where the next instruction lies, and which register a MOV names.
        for (told, assists) in [(true, true), (true, false), (false, false)] {
            let features = Features { nrip_save: told, decode_assists: assists, ..rig::features() };
            let mut guest = guest_of(&Machine { features, ..Machine::default() }, code);
            let mut sregs = guest.vcpu.sregs();
            (sregs.cr2, sregs.cr3) = (SECRET, SECRET);
            guest.vcpu.set_sregs(&sregs, None).unwrap();
            guest.touch_code();
            guest.then(move |vmcb, gprs| {
                gprs.0 = [7; 16];
                (vmcb.save.rax, vmcb.save.rsp, vmcb.save.rip) = (7, 7, CODE);
                vmcb.control.exit_code = ExitCode::ReadCr0.0;
                // Bit 63 is clear: no MOV.
                vmcb.control.exit_info_1 = 0;
                vmcb.control.next_rip = if told { CODE + 3 } else { 0 };
            });
            guest.ends(move |vmcb, gprs| {
                let [_, rest @ ..] = gprs.0;
                assert_eq!((vmcb.save.rax, rest), (7, [7; 15]), "{code:02x?}");
                assert_eq!((vmcb.save.cr3, vmcb.save.rip), (SECRET, CODE), "{code:02x?}");
            });
            // What was a read of a control register is refused; another instruction is executed by the CPU.
            let read = matches!(code, [_, 0x20, _]);
            assert_eq!(guest.injected(), if read { GP } else { 0 }, "{code:02x?}");
        }
    }
}

/// The VMM's breakpoints are in the debug registers, so that accesses of the guest's exit.
#[test]
fn bytes_that_came_after_a_debug_register_access_no_other() {
    const OWN: [u64; 6] = [0x1000, 0x2000, 0x3000, 0x4000, 0xffff_0ff0, 0x400];
    let privileged = |code: &[u8]| {
        let mut guest = guest(code);
        let mut sregs = guest.vcpu.sregs();
        (sregs.cs.attr, sregs.ss.attr) = (0xc9b, 0xc93);
        guest.vcpu.set_sregs(&sregs, None).unwrap();
        guest.vcpu.set_debug_regs(OWN);
        guest.vcpu.set_guest_debug(1 | 0x2_0000, [0x5000, 0, 0, 0, 0, 0, 0, 0x402]);
        guest
    };
    let access = |code: u64| {
        move |vmcb: &mut Vmcb, gprs: &mut Gprs| {
            gprs.0 = [0x7000; 16];
            (vmcb.save.rax, vmcb.save.rsp, vmcb.save.rip) = (0x7000, 0x7000, CODE);
            (vmcb.control.exit_code, vmcb.control.exit_info_1) = (code, 0);
        }
    };
    // MOV DR1, EAX; MOV EAX, DR1; MOV CR3, EAX: none is MOV DR2, EAX.
    for code in [[0x0f, 0x23, 0xc8], [0x0f, 0x21, 0xc8], [0x0f, 0x22, 0xd8]] {
        let mut guest = privileged(&code);
        guest.then(access(0x32));
        guest.ends(move |vmcb, _| {
            assert_eq!((vmcb.save.rip, vmcb.save.rax), (CODE, 0x7000), "{code:02x?}");
        });
        assert_eq!((guest.vcpu.debug_regs(), guest.injected()), (OWN, 0));
    }
    // What made the exit is done, by whichever name of the register.
    for (code, exit, at) in [([0x0f, 0x23, 0xd0], 0x32, 2), ([0x0f, 0x23, 0xe8], 0x37, 5)] {
        let mut guest = privileged(&code);
        guest.then(access(exit));
        guest.ends(|vmcb, _| assert_eq!(vmcb.save.rip, CODE + 3));
        assert_ne!(guest.vcpu.debug_regs()[at], OWN[at]);
    }
}

#[test]
fn a_string_instruction_to_a_port_needs_the_right_to_it() {
    let mut guest = guest(&[0x6e]); // outsb
    guest.then(port(false));
    guest.ends(|vmcb, _| assert_eq!(vmcb.save.rip, CODE));
    assert_eq!(guest.injected(), GP);
    let mut guest = self::guest(&[0x6e]);
    guest.then(port(true));
    guest.ends(|vmcb, _| assert_eq!(vmcb.save.rip, CODE));
    assert_eq!(guest.injected(), 0);
}

#[test]
fn an_access_that_was_answered_completes_the_instruction_that_made_it() {
    let mut guest = guest(&[0x03, 0x03]); // add eax, [rbx]
    guest.then(|vmcb, gprs| {
        device(false)(vmcb, gprs);
        vmcb.save.rax = 1;
    });
    assert!(matches!(guest.run(), UserExit::Mmio { write: false, len: 4, .. }));
    guest.place(&[0xee]);
    guest.ends(|vmcb, _| {
        assert_eq!((vmcb.save.rip, vmcb.save.rax), (CODE + 2, 0x0505_0506));
    });
    assert_eq!(guest.injected(), 0);
}

#[test]
fn a_repeated_access_under_single_step_traps_after_each_iteration() {
    const DB: u64 = 1 << 31 | 3 << 8 | 1;
    let mut guest = guest(&[0xf3, 0xaa]); // rep stosb
    guest.then(|vmcb, gprs| {
        device(true)(vmcb, gprs);
        gprs.0[RCX] = 3;
        gprs.0[7] = DEVICE;
        vmcb.save.rflags |= 1 << 8;
    });
    assert!(matches!(guest.run(), UserExit::Mmio { write: true, len: 1, .. }));
    guest.ends(|vmcb, gprs| {
        assert_eq!((vmcb.save.rip, gprs.0[RCX]), (CODE, 2));
        assert_ne!(vmcb.save.dr6 & 1 << 14, 0);
    });
    assert_eq!(guest.injected(), DB);
}

/// Those that a port has given are taken in one call, in which nobody looks for a signal.
#[test]
fn items_of_a_port_that_is_asked_no_more_hold_nobody_up() {
    const TO: u64 = 0x2_0000;
    let mut guest = guest(&[0xf3, 0x6c]); // rep insb
    guest.privileged();
    guest.memory(1, 0, TO);
    guest.then(|vmcb, gprs| {
        port(true)(vmcb, gprs);
        (gprs.0[RCX], gprs.0[RDI]) = (100, TO);
    });
    assert!(matches!(guest.run(), UserExit::Io { write: false, count: 100, .. }));
    // The memory goes: one by one they are a device's, the first of them now.
    guest.delete(1);
    assert!(matches!(guest.run(), UserExit::Mmio { gpa: TO, len: 1, write: true, .. }));
    guest.memory(1, 0, TO);
    let mut regs = guest.vcpu.regs();
    // The 8259A's: the kernel answers.
    (regs.gpr[RCX], regs.gpr[RDX], regs.gpr[RDI]) = (3000, 0x21, TO);
    guest.vcpu.set_regs(&regs);
    guest.ends(|vmcb, gprs| {
        let done = 3000 - gprs.0[RCX];
        assert_eq!((vmcb.save.rip, done), (CODE, emulate::ITERATIONS_PER_CALL.into()));
    });
}

/// The VMM stores what it is asked to, as flash memory does, or takes the slot away, before the instruction completes.
#[test]
fn a_read_modify_write_of_memory_that_is_read_only_reads_it_once() {
    // Of 1 in memory and EAX, and 2 in ECX: what is stored, ECX and ZF then. LOCK CMPXCHG [EBX], ECX; LOCK XADD; XCHG;
    // LOCK BTS; DEC.
    let codes: [(&[u8], u8, u64, bool); 5] = [
        (&[0xf0, 0x0f, 0xb1, 0x0b], 2, 2, true),
        (&[0xf0, 0x0f, 0xc1, 0x0b], 3, 1, false),
        (&[0x87, 0x0b], 2, 1, false),
        (&[0xf0, 0x0f, 0xab, 0x0b], 5, 2, false),
        (&[0xff, 0x0b], 0, 2, true),
    ];
    for ((code, stored, ecx, equal), gone) in codes.iter().flat_map(|c| [(*c, false), (*c, true)]) {
        let mut guest = guest(code);
        let memory = guest.memory(1, 2, DEVICE);
        memory.bytes()[0].store(1, Relaxed);
        guest.then(|vmcb, gprs| {
            device(true)(vmcb, gprs);
            (vmcb.save.rax, gprs.0[RCX]) = (1, 2);
        });
        let data = [stored, 0, 0, 0, 0, 0, 0, 0];
        let asked = UserExit::Mmio { gpa: DEVICE, len: 4, write: true, data };
        assert_eq!(guest.run(), asked, "{code:02x?}");
        memory.bytes()[0].store(stored, Relaxed);
        if gone {
            guest.delete(1);
        }
        guest.ends(move |vmcb, gprs| {
            let flags = Rflags::from_bits_retain(vmcb.save.rflags);
            assert_eq!((vmcb.save.rax, gprs.0[RCX]), (1, ecx), "{code:02x?}");
            assert_eq!(flags.contains(Rflags::ZF), equal, "{code:02x?}");
            assert!(!flags.contains(Rflags::CF), "{code:02x?}: the bit was clear");
            assert_eq!(vmcb.save.rip, CODE + code.len() as u64, "{code:02x?}");
        });
    }
}

/// The VMM has done the write, and takes the slot away that it was read from, before the instruction completes.
#[test]
fn a_write_that_was_answered_is_done_once_whatever_becomes_of_its_source() {
    const FROM: u64 = 0x2_0000;
    // OUTSB; MOVSB; PUSH [EBX].
    for code in [&[0x6e][..], &[0xa4], &[0xff, 0x33]] {
        let outs = code == [0x6e];
        let mut guest = guest(code);
        guest.privileged();
        guest.memory(1, 0, FROM).bytes()[0].store(7, Relaxed);
        guest.then(move |vmcb, gprs| {
            if outs {
                port(false)(vmcb, gprs);
            } else {
                device(true)(vmcb, gprs);
            }
            (gprs.0[RBX], gprs.0[RSI], gprs.0[RDI]) = (FROM, FROM, DEVICE);
            vmcb.save.rsp = DEVICE + 4;
        });
        match guest.run() {
            UserExit::Io { write: true, port: PORT, .. } => assert!(outs),
            UserExit::Mmio { gpa: DEVICE, write: true, data: [7, ..], .. } => assert!(!outs),
            other => panic!("{code:02x?}: {other:?}"),
        }
        guest.delete(1);
        let end = CODE + code.len() as u64;
        guest.ends(move |vmcb, _| assert_eq!(vmcb.save.rip, end, "{code:02x?}"));
        assert_eq!(guest.injected(), 0);
    }
}

/// Another vCPU changes the tables of the guest before the instruction completes.
#[test]
fn a_write_that_was_answered_is_done_once_whatever_its_addresses_lead_to() {
    const TABLE: u64 = 0x3_0000;
    const SPAN: u64 = 0x40_0000;
    // XADD [EBX], ECX; MOVSB; LOCK DEC of a byte. What is at its second 4 MiB goes to another device, or nowhere.
    let codes = [&[0x0f, 0xc1, 0x0b][..], &[0xa4], &[0xf0, 0xfe, 0x0b]];
    for (code, then) in codes.iter().flat_map(|code| [(*code, DEVICE + SPAN), (*code, 0)]) {
        let mut guest = guest(code);
        guest.privileged();
        let table = guest.memory(1, 0, TABLE);
        let map = |n: u64, to: u64| {
            let entry = if to == 0 { 0 } else { to as u32 | 0xe7 };
            for (at, byte) in entry.to_le_bytes().into_iter().enumerate() {
                table.bytes()[n as usize * 4 + at].store(byte, Relaxed);
            }
        };
        map(1, DEVICE);
        map(2, DEVICE + 2 * SPAN);
        table.bytes()[0].store(0xe7, Relaxed);
        let mut sregs = guest.vcpu.sregs();
        (sregs.cr0, sregs.cr3) = (x86::Cr0::from_bits_retain(0x8000_0031), TABLE);
        sregs.cr4 = x86::Cr4::from_bits_retain(0x10);
        guest.vcpu.set_sregs(&sregs, None).unwrap();
        guest.then(|vmcb, gprs| {
            device(true)(vmcb, gprs);
            (gprs.0[RBX], gprs.0[RCX]) = (SPAN, 2);
            (gprs.0[RSI], gprs.0[RDI]) = (SPAN, 2 * SPAN);
        });
        assert!(matches!(guest.run(), UserExit::Mmio { gpa: DEVICE, write: false, .. }));
        assert!(matches!(guest.run(), UserExit::Mmio { write: true, .. }), "{code:02x?}");
        map(1, then);
        let end = CODE + code.len() as u64;
        guest.ends(move |vmcb, _| assert_eq!(vmcb.save.rip, end, "{code:02x?}"));
        assert_eq!(guest.injected(), 0, "{code:02x?}: {then:x}");
    }
}

/// The other half of it is in memory, which goes, comes, or takes another value.
#[test]
fn a_read_modify_write_half_of_a_device_stores_each_half_once() {
    const LOW: u64 = DEVICE - 0x1000;
    // What becomes of the half in memory.
    for (value, gone) in [(1, false), (9, false), (1, true)] {
        let mut guest = guest(&[0x0f, 0xc1, 0x0b]); // xadd [ebx], ecx
        let memory = guest.memory(1, 0, LOW);
        memory.bytes()[0xffe].store(1, Relaxed);
        guest.then(|vmcb, gprs| {
            device(true)(vmcb, gprs);
            (gprs.0[RBX], gprs.0[RCX]) = (DEVICE - 2, 2);
        });
        assert!(matches!(guest.run(), UserExit::Mmio { gpa: DEVICE, len: 2, write: false, .. }));
        assert!(matches!(guest.run(), UserExit::Mmio { gpa: DEVICE, len: 2, write: true, .. }));
        memory.bytes()[0xffe].store(value, Relaxed);
        if gone {
            guest.delete(1);
            let data = [3, 0, 0, 0, 0, 0, 0, 0];
            let asked = UserExit::Mmio { gpa: DEVICE - 2, len: 2, write: true, data };
            assert_eq!(guest.run(), asked, "the half that nobody has stored");
        }
        guest.ends(|vmcb, gprs| {
            assert_eq!((vmcb.save.rip, gprs.0[RCX]), (CODE + 3, 0x0505_0001));
        });
        assert_eq!(memory.bytes()[0xffe].load(Relaxed), if gone { 1 } else { 3 });
    }
}

/// What comes between two iterations returns into the instruction: no breakpoint before it is met again (SDM vol. 3B
/// §18.3.1.1), and the shadow of the instruction before it ends with its first one.
#[test]
fn between_two_iterations_the_resume_flag_is_set() {
    let mut guest = guest(&[0xf3, 0xaa]); // rep stosb
    guest.then(|vmcb, gprs| {
        device(true)(vmcb, gprs);
        (gprs.0[RCX], gprs.0[RDI]) = (3, DEVICE);
        vmcb.control.int_state = 1;
    });
    for (left, inside) in [(3, false), (2, true), (1, true)] {
        assert!(matches!(guest.run(), UserExit::Mmio { write: true, len: 1, .. }));
        let regs = guest.vcpu.regs();
        assert_eq!((regs.gpr[RCX], regs.rflags.contains(Rflags::RF)), (left, inside));
        assert_eq!(guest.vcpu.saved_events().interrupt_shadow, !inside);
    }
    guest.ends(|vmcb, _| {
        assert_eq!((vmcb.save.rip, vmcb.save.rflags & Rflags::RF.bits()), (CODE + 2, 0));
    });
}
