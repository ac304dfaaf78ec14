//! A guest in real mode under VMX without EPT: it is never entered, and runs all the same.

mod rig;

use backend::{Registers, ShadowBy};
use gannet_vcpu::{RunInput, UserExit};
use host::page::Pages;
use host::std_port::test::{adopt, clock};
use mmu::Region;
use rig::vmx::{VmxVcpu, shadow_vcpu};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};
use vm::{
    VmRef,
    vcpu_shared::{MpState, Request},
};
use x86::Rflags;

/// A guest whose memory begins with these bytes at 0x1000, where it starts; the handler of vector 0x20 is an
/// INC BX and an IRET.
struct Guest {
    v: VmxVcpu,
    _vm: VmRef,
    _memory: Pages,
}

impl Guest {
    fn new(code: &[u8]) -> Self {
        let (mut v, vm) = shadow_vcpu();
        let memory = Pages::zeroed(4).unwrap();
        let mut bytes = vec![0u8; 4 << 12];
        bytes[0x20 * 4..0x20 * 4 + 2].copy_from_slice(&0x2000u16.to_le_bytes());
        bytes[0x2000..0x2002].copy_from_slice(&[0x43, 0xcf]);
        bytes[0x1000..0x1000 + code.len()].copy_from_slice(code);
        for (word, part) in memory.words().iter().zip(bytes.chunks_exact(8)) {
            word.store(u64::from_le_bytes(part.try_into().unwrap()), Relaxed);
        }
        let hva = memory.hpa().0;
        let region = Region { slot: 0, flags: 0, gpa: 0, size: 4 << 12, hva };
        vm.memory().set_region(&region, &**vm).unwrap();
        let mut s = v.sregs();
        (s.cs.base, s.cs.selector) = (0, 0);
        v.set_sregs(&s, None).unwrap();
        let mut regs = v.regs();
        regs.rip = 0x1000;
        regs.gpr[4] = 0x1ff0;
        v.set_regs(&regs);
        Self { v, _vm: vm, _memory: memory }
    }

    fn run(&mut self) -> UserExit {
        self.v.run(&RunInput::default())
    }
}

fn port(exit: UserExit) -> u16 {
    match exit {
        UserExit::Io { write: true, port, .. } => port,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_program_of_real_mode_runs_to_its_end() {
    // mov cx, 100; l: inc ax; loop l; int 0x20; push ax; push bx; pop bx; pop ax; out 0x42, al
    let code = [0xb9, 100, 0, 0x40, 0xe2, 0xfd, 0xcd, 0x20, 0x50, 0x53, 0x5b, 0x58, 0xe6, 0x42];
    let mut guest = Guest::new(&code);
    assert_eq!(port(guest.run()), 0x42);
    let regs = guest.v.regs();
    assert_eq!((regs.gpr[0], regs.gpr[1], regs.gpr[3]), (100, 0, 1));
    assert_eq!((regs.rip, regs.gpr[4]), (0x100c, 0x1ff0));
}

#[test]
fn a_load_of_ss_is_told_from_sti_where_interrupts_are_on() {
    // mov ss, ax, or sti; out 0x45, al
    for (code, flags, by) in [
        ([0x8e, 0xd0, 0xe6, 0x45], Rflags::IF, ShadowBy::MovSs),
        ([0x90, 0xfb, 0xe6, 0x45], Rflags::empty(), ShadowBy::Sti),
    ] {
        let mut guest = Guest::new(&code);
        let mut regs = guest.v.regs();
        regs.rflags |= flags;
        guest.v.set_regs(&regs);
        assert_eq!(port(guest.run()), 0x45);
        assert_eq!(guest.v.backend().shadow_by(), by);
    }
}

#[test]
fn an_exception_goes_to_its_handler() {
    // mov word [0], 0x100d; xor dx, dx; div dx; nop; (0x100d) out 0x43, al
    let code = [0xc7, 0x06, 0, 0, 0x0d, 0x10, 0x31, 0xd2, 0xf7, 0xf2, 0x90, 0xf4, 0x90, 0xe6, 0x43];
    let mut guest = Guest::new(&code);
    assert_eq!(port(guest.run()), 0x43);
    // Flags, CS and the faulting RIP are on the stack.
    assert_eq!(guest.v.regs().gpr[4], 0x1ff0 - 6);
}

#[test]
fn what_lies_behind_a_hlt_is_not_executed() {
    // cli; hlt; out 0x44, al
    let mut guest = Guest::new(&[0xfa, 0xf4, 0xe6, 0x44]);
    let waker = std::thread::spawn({
        let (world, shared) = (clock(), guest.v.shared().clone());
        move || {
            adopt(&world);
            let began = Instant::now();
            while shared.mp_state() != MpState::Halted && began.elapsed() < Duration::from_secs(5) {
                std::thread::yield_now();
            }
            shared.request_and_kick(Request::Dead);
        }
    });
    assert_eq!(guest.run(), UserExit::Dead);
    assert_eq!(guest.v.regs().rip, 0x1002);
    waker.join().unwrap();
}

#[test]
fn an_instruction_of_real_mode_goes_on_as_it_began() {
    // mov sp, 0x5000 (no memory is there); call +1; nop; out 0x45, al
    let mut guest = Guest::new(&[0xbc, 0, 0x50, 0xe8, 1, 0, 0x90, 0xe6, 0x45]);
    let UserExit::Mmio { write: true, gpa, .. } = guest.run() else { panic!("no store") };
    assert_eq!(gpa, 0x4ffe);
    assert_eq!(port(guest.run()), 0x45);
    assert_eq!(guest.v.regs().gpr[4], 0x4ffe);
}

#[test]
fn pause_is_for_everybody_and_rdtsc_as_cr4_says() {
    // pause; rdtsc; out 0x46, al
    let mut guest = Guest::new(&[0xf3, 0x90, 0x0f, 0x31, 0xe6, 0x46]);
    assert_eq!(port(guest.run()), 0x46);
}

#[test]
fn a_step_traps_by_the_flags_of_before_and_not_behind_a_load_of_ss() {
    let code = [
        0xc7, 0x06, 4, 0, 0, 0x20, // mov word [4], 0x2000: the trap's handler counts in BX
        0x68, 0x02, 0x01, // push 0x102
        0x9d, // popf: no trap yet
        0x90, // nop: a trap
        0x8e, 0xd0, // mov ss, ax: none
        0x90, // nop: a trap, and that of MOV SS is lost
        0x6a, 0x02, // push 2: a trap
        0x9d, // popf: a trap
        0xe6, 0x47, // out 0x47, al
    ];
    let mut guest = Guest::new(&code);
    assert_eq!(port(guest.run()), 0x47);
    assert_eq!(guest.v.regs().gpr[3], 4);
}

#[test]
fn int_n_takes_its_own_trap_away() {
    let code = [
        0xc7, 0x06, 4, 0, 0, 0x20, // mov word [4], 0x2000: the trap's handler counts in BX
        0xc7, 0x06, 0x80, 0, 0x12, 0x10, // mov word [0x80], 0x1012
        0x68, 0x02, 0x01, // push 0x102
        0x9d, // popf
        0xcd, 0x20, // int 0x20
        0xe6, 0x49, // (0x1012) out 0x49, al
    ];
    let mut guest = Guest::new(&code);
    assert_eq!(port(guest.run()), 0x49);
    assert_eq!(guest.v.regs().gpr[3], 0);
}

#[test]
fn rsm_outside_of_its_mode_is_an_invalid_opcode_at_any_privilege() {
    // mov word [0x18], 0x100a; rsm; nop; nop; (0x100a) out 0x48, al
    let mut guest =
        Guest::new(&[0xc7, 0x06, 0x18, 0, 0x0a, 0x10, 0x0f, 0xaa, 0x90, 0x90, 0xe6, 0x48]);
    // Real mode has no privilege, but for the one that a VMM leaves in SS.
    let mut s = guest.v.sregs();
    s.ss.attr |= 3 << 5;
    guest.v.set_sregs(&s, None).unwrap();
    assert_eq!(port(guest.run()), 0x48);
}
