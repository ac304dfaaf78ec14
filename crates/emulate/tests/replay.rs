//! The replay protocol: an instruction that needs user space starts again and asks for the same
//! accesses in the same order, and nothing that it already did is done twice.

mod machine;

use gannet_emulate::{ITERATIONS_PER_CALL, Outcome, STRING_RUN_BYTES, Stop};
use machine::{Event, RAX, RBX, RCX, RDI, RDX, RSI, RSP, TestMachine};
use proptest::prelude::*;
use x86::{Exception, Rflags, exception::pf};

const DEVICE: u64 = 0x8000;
const RAM: u64 = 0x1000;

fn device_at_rbx() -> TestMachine {
    let mut m = TestMachine::long();
    m.gpr[RBX] = DEVICE + 0x10;
    m
}

#[test]
fn a_load_is_one_read_and_one_answer() {
    let mut m = device_at_rbx();
    m.gpr[RAX] = u64::MAX;
    let done = m.run(&[0x8b, 0x03]).unwrap(); // mov eax, [rbx]
    assert_eq!(m.events, [Event::MmioRead(0x8010, 4)]);
    assert_eq!(m.gpr[RAX], 0x5566_7788);
    assert_eq!(done.rip, 0x40_0002);
    assert_eq!(done.outcome, Outcome::Done);
}

#[test]
fn a_read_modify_write_asks_user_space_once_for_each_half() {
    let mut m = device_at_rbx();
    m.gpr[RAX] = 1;
    m.run(&[0x01, 0x03]).unwrap(); // add [rbx], eax
    let expected = 0x5566_7789u32.to_le_bytes().to_vec();
    assert_eq!(m.events, [Event::MmioRead(0x8010, 4), Event::MmioWrite(0x8010, expected)]);
}

#[test]
fn a_locked_instruction_on_a_device_is_a_read_and_a_write() {
    let mut m = device_at_rbx();
    m.gpr[RAX] = 1;
    m.run(&[0xf0, 0x0f, 0xc1, 0x03]).unwrap(); // lock xadd [rbx], eax
    assert_eq!(m.gpr[RAX], 0x5566_7788);
    assert_eq!(m.events.len(), 2);
}

#[test]
fn registers_do_not_change_before_the_answer() {
    for code in [&[0x87u8, 0x03][..], &[0x48, 0x0f, 0xc1, 0x03], &[0xff, 0x33], &[0x58], &[0xac]] {
        let mut m = device_at_rbx();
        m.gpr[RSP] = DEVICE + 0x100;
        m.gpr[RSI] = DEVICE + 0x100;
        let before = m.clone();
        assert_eq!(m.once(code), Err(Stop::NeedUser), "{code:02x?}");
        assert_eq!(m.gpr, before.gpr, "{code:02x?}");
        assert_eq!(m.ram, before.ram, "{code:02x?}");
    }
}

#[test]
fn a_push_from_a_device_reads_it_once() {
    let mut m = device_at_rbx();
    m.gpr[RSP] = RAM + 0x800;
    m.run(&[0xff, 0x33]).unwrap(); // push qword [rbx]
    assert_eq!(m.events, [Event::MmioRead(0x8010, 8)]);
    assert_eq!(m.u64_at(RAM + 0x7f8), 0x1122_3344_5566_7788);
    assert_eq!(m.gpr[RSP], RAM + 0x7f8);
}

#[test]
fn a_call_through_a_device_pushes_the_next_instruction() {
    let mut m = device_at_rbx();
    m.device_value = 0x7000_1234;
    m.gpr[RSP] = RAM + 0x800;
    let done = m.run(&[0xff, 0x13]).unwrap(); // call [rbx]
    assert_eq!(done.rip, 0x7000_1234);
    assert_eq!(m.u64_at(RAM + 0x7f8), 0x40_0002);
}

#[test]
fn a_repeated_store_to_a_device_makes_each_access_once() {
    let mut m = TestMachine::long();
    m.gpr[RDI] = DEVICE;
    m.gpr[RCX] = 5;
    m.gpr[RAX] = 0xabcd;
    let done = m.run(&[0x66, 0xf3, 0xab]).unwrap(); // rep stosw
    assert_eq!(done.outcome, Outcome::Done);
    assert_eq!((m.gpr[RDI], m.gpr[RCX]), (DEVICE + 10, 0));
    let expected: Vec<_> =
        (0..5).map(|n| Event::MmioWrite(DEVICE + 2 * n, vec![0xcd, 0xab])).collect();
    assert_eq!(m.events, expected);
}

#[test]
fn finished_iterations_survive_a_stop() {
    let mut m = TestMachine::long();
    // Two elements of RAM, then the device.
    m.mmio = RAM + 0x1008..0x9000;
    m.gpr[RSI] = RAM + 0x1000;
    m.gpr[RDI] = RAM;
    m.gpr[RCX] = 4;
    m.set_bytes(RAM + 0x1000, &[1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(m.once(&[0xf3, 0xa5]), Err(Stop::NeedUser)); // rep movsd
    assert_eq!((m.gpr[RCX], m.gpr[RSI], m.gpr[RDI]), (2, RAM + 0x1008, RAM + 8));
    assert_eq!(m.commits, 2);
    m.user_space();
    m.run(&[0xf3, 0xa5]).unwrap();
    assert_eq!(m.gpr[RCX], 0);
    assert_eq!(m.events, [Event::MmioRead(0x2008, 4), Event::MmioRead(0x200c, 4)]);
}

#[test]
fn a_fault_in_a_repeated_instruction_leaves_registers_at_the_faulting_element() {
    let mut m = TestMachine::long();
    m.absent = RAM + 0x1000..RAM + 0x2000;
    m.gpr[RDI] = RAM + 0xff8;
    m.gpr[RCX] = 100;
    let fault = Stop::Fault(Exception::pf(RAM + 0x1000, pf::WRITE));
    assert_eq!(m.run(&[0xf3, 0xab]), Err(fault)); // rep stosd
    assert_eq!((m.gpr[RDI], m.gpr[RCX]), (RAM + 0x1000, 98));
    assert_eq!(m.rip, 0x40_0000);
}

#[test]
fn a_long_repetition_returns_between_iterations() {
    let mut m = TestMachine::long();
    m.gpr[RDI] = RAM;
    m.gpr[RCX] = 1000;
    let code = [0xf3, 0xaa]; // rep stosb
    let done = m.run(&code).unwrap();
    assert_eq!(done.outcome, Outcome::Continue);
    assert_eq!(done.rip, 0x40_0000);
    assert!(done.rflags.contains(Rflags::RF), "what comes now is in its middle");
    assert_eq!(m.gpr[RCX], 1000 - u64::from(ITERATIONS_PER_CALL));
    while m.run(&code).unwrap().outcome == Outcome::Continue {}
    assert_eq!((m.gpr[RCX], m.gpr[RDI]), (0, RAM + 1000));
    assert_eq!(m.rflags & Rflags::RF.bits(), 0);
}

/// Nobody looks for a signal within a call.
#[test]
fn a_call_ends_whatever_a_port_has_given() {
    let mut m = TestMachine::long();
    (m.items_wait, m.runs_allowed, m.ports_in_user_space) = (true, false, false);
    (m.gpr[RDI], m.gpr[RCX]) = (RAM, 4000);
    assert_eq!(m.run(&[0xf3, 0x6c]).unwrap().outcome, Outcome::Continue); // rep insb
    let most = u64::from(ITERATIONS_PER_CALL) + STRING_RUN_BYTES as u64;
    assert_eq!(m.gpr[RCX], 4000 - most);
}

#[test]
fn single_stepping_stops_after_each_iteration() {
    let mut m = TestMachine::long();
    m.rflags |= Rflags::TF.bits();
    m.gpr[RDI] = RAM;
    m.gpr[RCX] = 3;
    for left in [2, 1] {
        assert_eq!(m.run(&[0xf3, 0x6c]).unwrap().outcome, Outcome::Continue); // rep insb
        assert_eq!(m.gpr[RCX], left);
    }
    assert_eq!(m.run(&[0xf3, 0x6c]).unwrap().outcome, Outcome::Done);
    assert_eq!(m.events.len(), 3);
}

#[test]
fn string_input_is_one_port_access_per_run_of_ram() {
    let mut m = TestMachine::long();
    m.gpr[RDX] = 0x1f0;
    m.gpr[RDI] = RAM + 0xff0;
    m.gpr[RCX] = 12;
    let code = [0x66, 0xf3, 0x6d]; // rep insw
    while m.run(&code).unwrap().outcome == Outcome::Continue {}
    // 8 words up to the page's end, 4 behind it.
    assert_eq!(m.events, [Event::In(0x1f0, 2, 16), Event::In(0x1f0, 2, 8)]);
    assert_eq!((m.gpr[RDI], m.gpr[RCX]), (RAM + 0xff0 + 24, 0));
    assert_eq!(m.bytes(RAM + 0xff0, 2), [0x88, 0x77]);
}

#[test]
fn string_output_hands_over_what_memory_holds_one_by_one() {
    let mut m = TestMachine::long();
    m.gpr[RDX] = 0x402;
    m.gpr[RSI] = RAM;
    m.gpr[RCX] = 5;
    m.set_bytes(RAM, b"hello");
    m.run(&[0xf3, 0x6e]).unwrap(); // rep outsb
    assert_eq!(m.events, b"hello".map(|byte| Event::Out(0x402, 1, vec![byte])));
    assert_eq!((m.gpr[RSI], m.gpr[RCX]), (RAM + 5, 0));
}

#[test]
fn string_output_goes_backward_one_element_at_a_time() {
    let mut m = TestMachine::long();
    m.rflags |= Rflags::DF.bits();
    m.gpr[RSI] = RAM + 2;
    m.gpr[RCX] = 3;
    m.set_bytes(RAM, b"abc");
    m.run(&[0xf3, 0x6e]).unwrap();
    let one = |byte: u8| Event::Out(0, 1, vec![byte]);
    assert_eq!(m.events, [one(b'c'), one(b'b'), one(b'a')]);
    assert_eq!(m.gpr[RSI], RAM - 1);
}

#[test]
fn string_io_between_a_port_and_a_device_goes_element_by_element() {
    let mut m = TestMachine::long();
    m.gpr[RSI] = DEVICE;
    m.gpr[RCX] = 2;
    m.run(&[0xf3, 0x6e]).unwrap();
    assert!(matches!(
        m.events[..],
        [
            Event::MmioRead(0x8000, 1),
            Event::Out(0, 1, _),
            Event::MmioRead(0x8001, 1),
            Event::Out(0, 1, _)
        ]
    ));
}

#[test]
fn input_is_not_taken_from_the_device_when_memory_cannot_hold_it() {
    let mut m = TestMachine::long();
    m.read_only = RAM..RAM + 0x1000;
    m.gpr[RDI] = RAM + 4;
    m.gpr[RCX] = 3;
    let fault = Stop::Fault(Exception::pf(RAM + 4, pf::WRITE));
    assert_eq!(m.run(&[0xf3, 0x6c]), Err(fault)); // rep insb
    assert!(m.events.is_empty());
}

#[test]
fn forbidden_ports_fault_and_are_not_touched() {
    for code in [&[0xe4u8, 0x60][..], &[0xef], &[0x6c], &[0xf3, 0x6f]] {
        let mut m = TestMachine::long();
        // IOPL is 0, and the TSS has no bitmap.
        m.cpl = 3;
        m.gpr[RCX] = 1;
        (m.gpr[RSI], m.gpr[RDI]) = (RAM, RAM);
        assert_eq!(m.run(code), Err(Stop::Fault(Exception::gp(0))), "{code:02x?}");
        assert!(m.events.is_empty());
    }
}

#[test]
fn in_and_out_move_the_accumulator() {
    let mut m = TestMachine::long();
    m.gpr[RAX] = u64::MAX;
    m.gpr[RDX] = 0xffff_0cf8;
    m.run(&[0xed]).unwrap(); // in eax, dx
    assert_eq!(m.gpr[RAX], 0x5566_7788);
    m.run(&[0xe4, 0x60]).unwrap(); // in al, 0x60
    assert_eq!(m.gpr[RAX] >> 8, 0x55_6677);
    m.gpr[RAX] = 0xaabb;
    m.run(&[0x66, 0xef]).unwrap(); // out dx, ax
    m.run(&[0xe6, 0x80]).unwrap(); // out 0x80, al
    assert_eq!(m.events[0], Event::In(0xcf8, 4, 4));
    assert_eq!(m.events[2], Event::Out(0xcf8, 2, vec![0xbb, 0xaa]));
    assert_eq!(m.events[3], Event::Out(0x80, 1, vec![0xbb]));
}

#[test]
fn a_read_only_destination_faults_before_it_is_read() {
    let mut m = device_at_rbx();
    m.read_only = DEVICE..DEVICE + 0x1000;
    let fault = Stop::Fault(Exception::pf(DEVICE + 0x10, pf::WRITE));
    let codes: [&[u8]; 5] = [
        &[0x01, 0x03],             // add [rbx], eax
        &[0x87, 0x03],             // xchg [rbx], eax
        &[0x0f, 0xb1, 0x0b],       // cmpxchg [rbx], ecx
        &[0x0f, 0xc7, 0x0b],       // cmpxchg8b [rbx]
        &[0xf0, 0x0f, 0xab, 0x03], // lock bts [rbx], eax
    ];
    for code in codes {
        assert_eq!(m.run(code), Err(fault), "{code:02x?}");
        assert!(m.events.is_empty(), "{code:02x?}");
    }
}

#[test]
fn a_write_across_pages_is_all_or_nothing() {
    let mut m = TestMachine::long();
    m.read_only = RAM + 0x1000..RAM + 0x2000;
    m.gpr[RBX] = RAM + 0xffe;
    m.gpr[RAX] = u64::MAX;
    let fault = Stop::Fault(Exception::pf(RAM + 0x1000, pf::WRITE));
    assert_eq!(m.run(&[0x89, 0x03]), Err(fault)); // mov [rbx], eax
    assert_eq!(m.bytes(RAM + 0xffe, 2), [0, 0]);
    assert_eq!(m.run(&[0xf0, 0x01, 0x03]), Err(fault)); // lock add [rbx], eax
    assert_eq!(m.bytes(RAM + 0xffe, 2), [0, 0]);
}

#[test]
fn a_lost_race_is_tried_again_with_the_new_value() {
    let mut m = TestMachine::long();
    m.gpr[RBX] = RAM;
    m.gpr[RAX] = 100;
    m.lost_races = 3;
    m.run(&[0xf0, 0x0f, 0xc1, 0x03]).unwrap(); // lock xadd [rbx], eax
    assert_eq!(m.bytes(RAM, 4), [103, 0, 0, 0]);
    assert_eq!(m.gpr[RAX], 3);
    m.lost_races = usize::MAX;
    assert_eq!(m.once(&[0x87, 0x03]), Err(Stop::Retry)); // xchg [rbx], eax
    assert_eq!(m.gpr[RAX], 3);
}

/// Instructions whose memory operand is [rbx], and those that use RSI and RDI.
const ON_MEMORY: [&[u8]; 24] = [
    &[0x8b, 0x03],
    &[0x48, 0x89, 0x03],
    &[0xc7, 0x03, 1, 2, 3, 4],
    &[0x0f, 0xbe, 0x03],
    &[0x48, 0x01, 0x0b],
    &[0x66, 0xf0, 0x11, 0x0b],
    &[0x3b, 0x03],
    &[0xf6, 0x03, 0x80],
    &[0xd1, 0x23],
    &[0x0f, 0xa4, 0x03, 5],
    &[0x48, 0x0f, 0xba, 0x3b, 37],
    &[0x48, 0x87, 0x03],
    &[0x0f, 0xc1, 0x03],
    &[0xf0, 0x48, 0x0f, 0xb1, 0x0b],
    &[0xf0, 0x0f, 0xc7, 0x0b],
    &[0x48, 0xf7, 0x23],
    &[0x0f, 0x94, 0x03],
    &[0x0f, 0x44, 0x03],
    &[0xff, 0x33],
    &[0x8f, 0x03],
    &[0x48, 0xa5],
    &[0xa7],
    &[0xf3, 0xa5],
    &[0xf3, 0xa4],
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    /// What a device holds and RAM holds make no difference to the result, wherever the border
    /// between them runs: with replay an instruction does what it does in one go.
    #[test]
    fn an_instruction_split_by_user_space_has_the_same_result(
        which in 0..ON_MEMORY.len(),
        gpr in any::<[u64; 16]>(),
        offset in 0u64..32,
        count in 0u64..6,
    ) {
        let code = ON_MEMORY[which];
        let set_up = |m: &mut TestMachine| {
            m.gpr = gpr;
            m.gpr[RBX] = RAM + 0xff0 + offset;
            m.gpr[RSP] = RAM + 0x400;
            m.gpr[RSI] = RAM + 0xff0 + offset;
            m.gpr[RDI] = RAM + 0x1800;
            m.gpr[RCX] = count;
        };
        // The plain machine: RAM holds what the device would answer, a constant byte.
        let mut plain = TestMachine::long();
        set_up(&mut plain);
        plain.ram[0x1000..].fill(0x5a);
        let mut split = TestMachine::long();
        set_up(&mut split);
        split.mmio = RAM + 0x1000..RAM + 0x2000;
        split.device_value = 0x5a5a_5a5a_5a5a_5a5a;
        loop {
            // The device answers the same byte for ever.
            match split.step(code) {
                Err(Stop::NeedUser) => {
                    split.user_space();
                    split.device_value = 0x5a5a_5a5a_5a5a_5a5a;
                }
                Ok(Outcome::Done) => break,
                Ok(Outcome::Continue) => {}
                Err(stop) => panic!("{stop:?}"),
            }
        }
        while plain.run(code).unwrap().outcome == Outcome::Continue {}
        prop_assert_eq!(plain.gpr, split.gpr);
        prop_assert_eq!(plain.rflags, split.rflags);
        prop_assert_eq!(&plain.ram[..0x1000], &split.ram[..0x1000]);
        // Replaying the device's writes over its constant gives what RAM became.
        let mut device = vec![0x5a; 0x1000];
        for event in &split.events {
            if let Event::MmioWrite(at, data) = event {
                let at = (at - RAM - 0x1000) as usize;
                device[at..at + data.len()].copy_from_slice(data);
            }
        }
        prop_assert_eq!(&plain.ram[0x1000..], &device[..]);
    }
}
