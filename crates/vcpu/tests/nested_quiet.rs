//! What changes place without a look at events loses none. A turn from one level to the other looks at events only if
//! one may wait; whether one does is asked of a dozen places, and each kind of event that comes to be has to be among
//! them. So random guests are run twice: as they are, and with a look forced after each exit and something that waits
//! for ever, so that whether something waits decides nothing. What they see is the same.

mod rig;

use std::sync::{Arc, Mutex};

use backend::{Gprs, RAX, RCX, RDX};
use gannet_vcpu::UserExit;
use host::std_port::test as surroundings;
use irqchip::lapic::{BaseRules, base};
use proptest::prelude::*;
use rig::nested::{BLOCK, Hypervisor, KEPT, L1_RIP, L2_RIP, vmrun};
use rig::{exit, shutdown};
use vm::vcpu_shared::Request;
use x86::vmcb::{ExitCode, Vmcb, vintr};
use x86::{Rflags, Vector};

/// The spurious-interrupt vector register, as an x2APIC names it.
const SVR: u32 = 0x80f;
/// That which ends an interrupt.
const EOI: u64 = 0x80b;
/// An interrupt that the guest's priority keeps away.
const TOO_LOW: u8 = 0x1f;
const VINTR: u32 = 1 << 4;
const IRET: u32 = 1 << 20;

/// What comes from elsewhere while the guest runs.
#[derive(Clone, Copy, Debug)]
enum Event {
    Nothing,
    Nmi,
    Interrupt(u8),
    Smi,
    Init,
}

/// What whoever runs does.
#[derive(Clone, Copy, Debug)]
enum Act {
    /// L1's is answered, L2's L1's if it asked for it.
    Cpuid,
    /// The host is interrupted.
    Intr,
    /// L1 enters L2. L2 makes a hypercall.
    Cross,
    /// STGI, or IRET, if that has an exit.
    Opens,
    /// CLGI, or HLT's opposite: nothing.
    Closes,
    /// An interrupt is done with.
    Eoi,
    /// OUT, whereupon user space queues an NMI.
    Out(bool),
}

/// One turn.
#[derive(Clone, Copy, Debug)]
struct Turn {
    event: Event,
    act: Act,
    /// RFLAGS.IF, and the interrupt shadow, at the exit.
    interrupts: bool,
    shadow: bool,
}

/// What the guest sees of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Seen {
    rip: u64,
    /// The interrupt that was taken last and is not done, and how many NMIs wait: what was injected is seen by that.
    in_service: Option<Vector>,
    nmis: u32,
    rflags: u64,
    /// The CPU interrupts itself: the exit for that comes first.
    kicked: bool,
}

/// An entry: what the guest sees, whether an interrupt window is open for one that waits, and whether that of NMIs is.
type Entry = (Seen, bool, bool);

fn turn(turn: Turn, vmcb: &mut Vmcb, gprs: &mut Gprs, in_l2: bool) {
    match turn.act {
        Act::Cpuid => exit(ExitCode::Cpuid)(vmcb, gprs),
        Act::Intr => exit(ExitCode::Intr)(vmcb, gprs),
        Act::Cross if in_l2 => {
            exit(ExitCode::Vmmcall)(vmcb, gprs);
            vmcb.control.next_rip = vmcb.save.rip + 3;
        }
        Act::Cross => vmrun(vmcb, gprs),
        Act::Opens if vmcb.control.intercepts[3] & IRET != 0 => {
            exit(ExitCode::Iret)(vmcb, gprs);
        }
        Act::Opens | Act::Closes if in_l2 => exit(ExitCode::Intr)(vmcb, gprs),
        Act::Opens => {
            exit(ExitCode::Stgi)(vmcb, gprs);
            vmcb.control.next_rip = vmcb.save.rip + 3;
        }
        Act::Closes => {
            exit(ExitCode::Clgi)(vmcb, gprs);
            vmcb.control.next_rip = vmcb.save.rip + 3;
        }
        Act::Eoi => {
            exit(ExitCode::Msr)(vmcb, gprs);
            vmcb.control.exit_info_1 = 1;
            (vmcb.save.rax, gprs.0[RCX], gprs.0[RDX]) = (0, EOI, 0);
        }
        Act::Out(_) => {
            exit(ExitCode::Ioio)(vmcb, gprs);
            // OUT of one byte to port 0x60.
            vmcb.control.exit_info_1 = 0x60 << 16 | 1 << 4;
            vmcb.control.exit_info_2 = vmcb.save.rip + 2;
        }
    }
    gprs.0[RAX] = vmcb.save.rax;
    vmcb.control.exit_int_info = 0;
    let rflags = vmcb.save.rflags & !Rflags::IF.bits();
    vmcb.save.rflags = rflags | if turn.interrupts { Rflags::IF.bits() } else { 0 };
    vmcb.control.int_state = turn.shadow.into();
}

/// What L1 asks for in its block.
#[derive(Clone, Copy, Debug)]
struct Block {
    /// The third word of intercepts: INTR, NMI, SMI, INIT, and CPUID.
    intercepts: u32,
    /// V_INTR_MASKING and V_TPR.
    int_ctl: u32,
    interrupts: bool,
}

fn play(block: Block, turns: &[Turn], looks: bool) -> Vec<Entry> {
    let mut machine = Hypervisor::new(true);
    machine.put(BLOCK + 0x08, u64::from(block.intercepts) << 32);
    // VMRUN, and VMMCALL, which ends L2's run.
    machine.put(BLOCK + 0x10, 3);
    machine.put(BLOCK + 0x60, block.int_ctl.into());
    machine.put(BLOCK + 0x570, if block.interrupts { 0x202 } else { 2 });
    let shared = machine.vcpu.shared().clone();
    let rules = BaseRules { maxphyaddr: 48, x2apic: true, host: true };
    shared.lapic.set_base(shared.lapic.base() | base::EXTD, rules).unwrap();
    assert!(shared.lapic.write_x2(SVR, 0x1ff).is_ok());
    // What an entry reads and writes is in the VM's tables: it takes place inside the loop.
    for page in [BLOCK, KEPT, 0, 0x1000, 0x2000, 0x3000] {
        machine.then(move |vmcb, gprs| {
            exit(ExitCode::Npf)(vmcb, gprs);
            vmcb.control.exit_info_1 = 1 << 32 | 2;
            (vmcb.control.exit_info_2, vmcb.control.exit_int_info) = (page, 0);
        });
    }
    let mut sregs = machine.vcpu.sregs();
    sregs.cr8 = 1;
    machine.vcpu.set_sregs(&sregs, None).unwrap();
    if looks {
        // It waits for ever, so that nothing is ever quiet.
        shared.lapic.set_irr(Vector(TOO_LOW));
    }
    let _ = surroundings::take_kicks();
    let entries = Arc::new(Mutex::new(Vec::new()));
    let queues = Arc::new(Mutex::new(false));
    for &now in turns {
        let (entries, queues, shared) = (entries.clone(), queues.clone(), shared.clone());
        machine.then(move |vmcb, gprs| {
            let seen = Seen {
                rip: vmcb.save.rip,
                in_service: shared.lapic.in_service(),
                nmis: shared.nmis(),
                rflags: vmcb.save.rflags,
                kicked: !surroundings::take_kicks().is_empty(),
            };
            let [_, _, _, third, ..] = vmcb.control.intercepts;
            // One that is open for what was taken meanwhile costs an exit, no more.
            let waits = shared.lapic.highest_pending().is_some();
            let window = third & VINTR != 0 && vmcb.control.int_ctl & vintr::IRQ != 0 && waits;
            entries.lock().unwrap().push((seen, window, third & IRET != 0));
            match now.event {
                Event::Nothing => {}
                Event::Nmi => shared.add_nmi(),
                Event::Interrupt(vector) => {
                    shared.lapic.set_irr(Vector(vector));
                    shared.request(Request::Event);
                }
                Event::Smi => shared.request(Request::Smi),
                Event::Init => shared.set_init(true),
            }
            let in_l2 = (L2_RIP..L2_RIP + 0x1000).contains(&vmcb.save.rip);
            // Whoever sends something interrupts the CPU.
            let interrupted = seen.kicked || !matches!(now.event, Event::Nothing);
            let act = if interrupted { Act::Intr } else { now.act };
            turn(Turn { act, ..now }, vmcb, gprs, in_l2);
            *queues.lock().unwrap() = matches!(act, Act::Out(true));
            if looks {
                shared.request(Request::Event);
            }
        });
    }
    for _ in 0..4 {
        machine.then(shutdown);
    }
    for _ in 0..=turns.len() {
        match machine.run() {
            UserExit::Io { .. } if *queues.lock().unwrap() => machine.vcpu.queue_nmi(),
            UserExit::Io { .. } => {}
            _ => break,
        }
    }
    let entries = entries.lock().unwrap();
    entries.clone()
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        8 => Just(Event::Nothing),
        4 => Just(Event::Nmi),
        4 => (0x20..0x50_u8).prop_map(Event::Interrupt),
        1 => Just(Event::Smi),
        1 => Just(Event::Init),
    ]
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        2 => Just(Act::Cpuid),
        1 => Just(Act::Intr),
        4 => Just(Act::Cross),
        2 => Just(Act::Opens),
        2 => Just(Act::Closes),
        2 => Just(Act::Eoi),
        1 => any::<bool>().prop_map(Act::Out),
    ]
}

fn one_turn() -> impl Strategy<Value = Turn> {
    (event(), act(), any::<bool>(), prop::bool::weighted(0.2))
        .prop_map(|(event, act, interrupts, shadow)| Turn { event, act, interrupts, shadow })
}

fn block() -> impl Strategy<Value = Block> {
    (0..16_u32, any::<bool>(), any::<bool>(), 0..4_u32, any::<bool>()).prop_map(
        |(events, cpuid, masking, priority, interrupts)| Block {
            intercepts: events | u32::from(cpuid) << 18,
            int_ctl: priority | if masking { vintr::INTR_MASKING } else { 0 },
            interrupts,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]
    #[test]
    fn a_look_at_events_after_each_exit_changes_nothing(
        block in block(),
        turns in prop::collection::vec(one_turn(), 1..40),
    ) {
        let (plain, looked) = (play(block, &turns, false), play(block, &turns, true));
        let seen = |entries: &[Entry]| entries.iter().map(|e| e.0).collect::<Vec<_>>();
        prop_assert_eq!(seen(&plain), seen(&looked));
        for (plain, looked) in plain.iter().zip(&looked) {
            // An entry that ends at once for a kick, behind which events are looked at again, needs no window. One may still
            // be open there of an entry before.
            let ends = plain.0.kicked;
            let opens = ends || plain.1 >= looked.1 && plain.2 >= looked.2;
            prop_assert!(opens, "{plain:x?} {looked:x?}");
        }
    }
}

/// What an interrupt that came with GIF clear comes to once L1 enters an L2 that takes interrupts.
fn after_a_held_interrupt(intercepts: u32) -> Vec<Seen> {
    let t = |event, act| Turn { event, act, interrupts: true, shadow: false };
    let turns = [
        // The first entry allocates, outside the loop.
        t(Event::Nothing, Act::Cross),
        t(Event::Nothing, Act::Cross),
        t(Event::Nothing, Act::Closes),
        t(Event::Interrupt(0x33), Act::Intr),
        t(Event::Nothing, Act::Cross),
        t(Event::Nothing, Act::Cpuid),
        t(Event::Nothing, Act::Cpuid),
    ];
    let block = Block { intercepts, int_ctl: 0, interrupts: true };
    play(block, &turns, false).iter().map(|entry| entry.0).collect()
}

#[test]
fn an_interrupt_that_was_held_back_is_taken_behind_vmrun() {
    let entries = after_a_held_interrupt(0);
    let [.., before, l2, _] = entries[..] else { panic!("{entries:x?}") };
    assert_eq!(before.in_service, None);
    assert_eq!((l2.rip, l2.in_service), (L2_RIP, Some(Vector(0x33))));
    // L1 asked for it: it ends L2's run before its first instruction.
    let entries = after_a_held_interrupt(1);
    let [.., l2, l1] = entries[..] else { panic!("{entries:x?}") };
    assert_eq!((l2.rip, l2.kicked, l2.in_service), (L2_RIP, true, None));
    assert_eq!((l1.rip, l1.in_service), (L1_RIP + 9, None));
}

/// An INIT that came with GIF clear, and that L1 does not intercept, comes before L2's first instruction.
#[test]
fn an_init_that_was_held_back_comes_with_vmrun() {
    const RESET: u64 = 0xfff0;
    let t = |event, act| Turn { event, act, interrupts: true, shadow: false };
    let turns = [
        // The first entry allocates, outside the loop.
        t(Event::Nothing, Act::Cross),
        t(Event::Nothing, Act::Cross),
        t(Event::Nothing, Act::Closes),
        t(Event::Init, Act::Intr),
        t(Event::Nothing, Act::Cross),
        t(Event::Nothing, Act::Intr),
    ];
    let block = Block { intercepts: 0, int_ctl: 0, interrupts: true };
    let entries = play(block, &turns, false);
    let rips: Vec<u64> = entries.iter().map(|entry| entry.0.rip).collect();
    assert_eq!(rips[2..], [L1_RIP + 3, L1_RIP + 6, L1_RIP + 6, RESET]);
}

/// An NMI that an interrupt shadow keeps from L2, whose shadow ends by an instruction that is answered inside the loop:
/// the exit that was asked for is where it is injected, though L2 takes no interrupts. The step towards it is none of L2's,
/// which has no IRET that popped its flags: L1's is over.
#[test]
fn an_nmi_behind_a_shadow_comes_with_the_next_exit() {
    let t = |event, act, shadow| Turn { event, act, interrupts: false, shadow };
    let n = Event::Nothing;
    let turns = [
        t(Event::Nmi, Act::Intr, false),
        t(n, Act::Opens, false),
        t(n, Act::Cross, false),
        t(Event::Nmi, Act::Intr, true),
        t(n, Act::Eoi, false),
        t(n, Act::Intr, false),
    ];
    let block = Block { intercepts: 1, int_ctl: 0, interrupts: false };
    let entries = play(block, &turns, false);
    let [.., stepped, last] = entries[..] else { panic!("{entries:x?}") };
    assert_eq!((stepped.0.nmis, stepped.0.rflags), (1, 2 | (Rflags::TF | Rflags::RF).bits()));
    assert_eq!((last.0.nmis, last.0.rip, last.0.rflags), (0, L2_RIP + 2, 2));
}
