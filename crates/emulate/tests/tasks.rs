//! Task switches: what is saved and loaded, what is marked busy, and which task takes which fault (SDM
//! vol. 3A §8.3, table 8-1).

mod machine;

use gannet_emulate::{CodeSize, SegReg, Source, Stop, Switched, TaskSwitch, switch_task};
use machine::{RAX, RSP, SYSTEM, TSS, TestMachine};
use x86::{Exception, Rflags};

const OLD: u16 = 0x40;
const NEW: u16 = 0x48;
const NEW_TSS: u64 = SYSTEM + 0x2000;
const NT: u64 = 1 << 14;
const CODE0: u64 = 0x00cf_9a00_0000_ffff;
const DATA0: u64 = 0x00cf_9200_0000_ffff;

fn descriptor(base: u64, limit: u64, kind: u64) -> u64 {
    limit | (base & 0xff_ffff) << 16 | (0x80 | kind) << 40 | (base >> 24) << 56
}

fn put(m: &mut TestMachine, at: u64, bytes: &[u8]) {
    let at = (at - SYSTEM) as usize;
    m.system[at..at + bytes.len()].copy_from_slice(bytes);
}

fn word(m: &TestMachine, at: u64) -> u32 {
    let at = (at - SYSTEM) as usize;
    u32::from_le_bytes(m.system[at..at + 4].try_into().unwrap())
}

/// Two tasks of 32 bits.
fn two_tasks() -> TestMachine {
    let mut m = TestMachine::new(CodeSize::Bits32, 0x1000, 0x2000);
    m.cr0 = 0x8000_0001;
    m.set_descriptor(0x08, CODE0);
    m.set_descriptor(0x10, DATA0);
    m.set_descriptor(OLD, descriptor(TSS, 0x67, 0xb));
    m.set_descriptor(NEW, descriptor(NEW_TSS, 0x67, 0x9));
    m.segments[SegReg::Cs as usize].selector = 0x08;
    for (at, value) in
        [(28, 0x5000u32), (32, 0x1234), (36, 2), (40, 0xaaaa), (56, 0x1800), (72, 0x10), (76, 8)]
    {
        put(&mut m, NEW_TSS + at, &value.to_le_bytes());
    }
    for at in [80, 84, 88, 92] {
        put(&mut m, NEW_TSS + at, &0x10u32.to_le_bytes());
    }
    m.gpr[RAX] = 0x7777_7777;
    m
}

fn switch(source: Source) -> TaskSwitch {
    TaskSwitch {
        selector: NEW,
        source,
        return_to: 0x40_0007,
        restarts: false,
        error_code: None,
        external: false,
    }
}

fn kinds(m: &TestMachine) -> [u64; 2] {
    [OLD, NEW].map(|s| m.descriptor(s) >> 40 & 0xf)
}

#[test]
fn a_call_nests_the_new_task_and_iret_goes_back() {
    let mut m = two_tasks();
    let done = switch_task(&mut m, &switch(Source::Call)).unwrap();
    assert_eq!(done, Switched { rip: 0x1234, rflags: Rflags::FIXED | Rflags::NT, exception: None });
    assert_eq!((m.gpr[RAX], m.gpr[RSP], m.cr3), (0xaaaa, 0x1800, 0x5000));
    assert_eq!((word(&m, TSS + 32), word(&m, TSS + 40)), (0x40_0007, 0x7777_7777));
    assert_eq!(word(&m, NEW_TSS) & 0xffff, OLD.into());
    assert_eq!(kinds(&m), [0xb, 0xb]);
    assert_eq!(m.segments[SegReg::Tr as usize].selector, NEW);
    assert_ne!(m.cr0 & 8, 0);

    (m.rip, m.rflags) = (done.rip, done.rflags.bits());
    let back = TaskSwitch { selector: OLD, return_to: 0x1236, ..switch(Source::Iret) };
    for at in [72, 80, 84, 88, 92] {
        put(&mut m, TSS + at, &0x10u32.to_le_bytes());
    }
    let done = switch_task(&mut m, &back).unwrap();
    assert_eq!(
        (done.rip, done.rflags.contains(Rflags::NT), done.exception),
        (0x40_0007, false, None)
    );
    assert_eq!(m.gpr[RAX], 0x7777_7777);
    // NT is clear in the image of the task that has ended.
    assert_eq!(word(&m, NEW_TSS + 36) as u64 & NT, 0);
    assert_eq!(kinds(&m), [0xb, 0x9]);
}

#[test]
fn a_jump_leaves_nothing_nested() {
    let mut m = two_tasks();
    let done = switch_task(&mut m, &switch(Source::Jmp)).unwrap();
    assert!(!done.rflags.contains(Rflags::NT));
    assert_eq!(kinds(&m), [0x9, 0xb]);
}

#[test]
fn an_events_error_code_goes_onto_the_new_stack() {
    let mut m = two_tasks();
    let event = TaskSwitch {
        error_code: Some(0x55),
        external: true,
        restarts: true,
        ..switch(Source::Gate)
    };
    switch_task(&mut m, &event).unwrap();
    assert_eq!(m.gpr[RSP], 0x17fc);
    assert_eq!(m.bytes(0x17fc, 4), [0x55, 0, 0, 0]);
    assert_ne!(u64::from(word(&m, TSS + 36)) & Rflags::RF.bits(), 0);
}

#[test]
fn the_old_task_takes_what_is_wrong_with_the_new_ones_descriptor() {
    let gp = Exception::gp(NEW.into());
    let ts = Exception::ts(NEW.into());
    let np = Exception::np(NEW.into());
    let cases = [
        (descriptor(NEW_TSS, 0x67, 0xb), Source::Call, gp),
        (descriptor(NEW_TSS, 0x67, 0x9), Source::Iret, ts),
        (descriptor(NEW_TSS, 0x66, 0x9), Source::Jmp, ts),
        (descriptor(NEW_TSS, 0x67, 0x9) & !(1 << 47), Source::Jmp, np),
        (DATA0, Source::Jmp, gp),
    ];
    for (raw, source, exception) in cases {
        let mut m = two_tasks();
        m.set_descriptor(NEW, raw);
        let before = (m.system.clone(), m.segments, m.gpr);
        assert_eq!(switch_task(&mut m, &switch(source)), Err(Stop::Fault(exception)), "{raw:#x}");
        assert_eq!((m.system, m.segments, m.gpr), before);
    }
    // And a page fault on either TSS.
    for absent in [TSS, NEW_TSS] {
        let mut m = two_tasks();
        m.system_absent = absent..absent + 0x1000;
        let before = (m.system.clone(), m.segments, m.gpr);
        assert!(matches!(
            switch_task(&mut m, &switch(Source::Call)),
            Err(Stop::Fault(Exception { vector: x86::Vector(14), .. }))
        ));
        assert_eq!((m.system, m.segments, m.gpr), before);
    }
}

#[test]
fn the_new_task_takes_what_is_wrong_with_its_segments() {
    let cases = [
        (76, 0u32, Exception::ts(0)),        // CS null
        (76, 0x10, Exception::ts(0x10)),     // CS of data
        (76, 0x50, Exception::np(0x50)),     // CS not present
        (80, 0, Exception::ts(0)),           // SS null
        (80, 0x08, Exception::ts(0x08)),     // SS of code
        (84, 0x1000, Exception::ts(0x1000)), // DS beyond the table
        (96, 0x10, Exception::ts(0x10)),     // LDT of data
    ];
    for (at, selector, exception) in cases {
        let mut m = two_tasks();
        m.set_descriptor(0x50, CODE0 & !(1 << 47));
        put(&mut m, NEW_TSS + at, &selector.to_le_bytes());
        let done = switch_task(&mut m, &switch(Source::Call)).unwrap();
        assert_eq!(done.exception, Some(exception), "{selector:#x} at {at}");
        assert_eq!((done.rip, m.segments[SegReg::Tr as usize].selector), (0x1234, NEW));
        // From outside of the program the error code says so.
        let mut m = two_tasks();
        m.set_descriptor(0x50, CODE0 & !(1 << 47));
        put(&mut m, NEW_TSS + at, &selector.to_le_bytes());
        let event = TaskSwitch { external: true, ..switch(Source::Gate) };
        let got = switch_task(&mut m, &event).unwrap().exception.unwrap();
        assert_eq!(got.error_code, exception.error_code.map(|code| code | 1));
    }
}

#[test]
fn a_task_of_virtual_8086_mode_has_its_segments() {
    let mut m = two_tasks();
    put(&mut m, NEW_TSS + 36, &(Rflags::VM.bits() as u32 | 2).to_le_bytes());
    put(&mut m, NEW_TSS + 76, &0x1234u32.to_le_bytes());
    let done = switch_task(&mut m, &switch(Source::Jmp)).unwrap();
    assert_eq!((done.exception, m.cpl), (None, 3));
    let cs = m.segments[SegReg::Cs as usize];
    assert_eq!((cs.base, cs.limit, cs.attributes), (0x12340, 0xffff, 0xf3));
}

#[test]
fn a_task_may_ask_for_a_trap() {
    let mut m = two_tasks();
    put(&mut m, NEW_TSS + 100, &[1]);
    let done = switch_task(&mut m, &switch(Source::Jmp)).unwrap();
    assert_eq!(done.exception, Some(Exception::db(1 << 15)));
}

#[test]
fn tasks_of_16_bits_keep_to_their_form() {
    let mut m = two_tasks();
    m.set_descriptor(NEW, descriptor(NEW_TSS, 0x2b, 0x1));
    let words: [(u64, u16); 7] =
        [(14, 0x999), (16, 2), (18, 0x1111), (26, 0x1800), (34, 0x10), (36, 8), (38, 0x10)];
    put(&mut m, NEW_TSS, &[0; 44]);
    for (at, value) in words {
        put(&mut m, NEW_TSS + at, &value.to_le_bytes());
    }
    let done = switch_task(&mut m, &switch(Source::Call)).unwrap();
    assert_eq!((done.rip, done.exception), (0x999, None));
    assert_eq!((m.gpr[RAX], m.cr3), (0x7777_1111, 0));
    // What the old task had is in its own form.
    assert_eq!((word(&m, TSS + 32), word(&m, TSS + 40)), (0x40_0007, 0x7777_7777));
    assert_eq!(kinds(&m), [0xb, 0x3]);
}
