use std::vec::Vec;

use x86::vmcs::field;

use super::*;
use crate::testing::{LIMITS, Memory, capabilities, good, set};

const CONTEXT: Context = Context { offered: true, smm: false, enlightened: false };

fn state(flags: u16, vmxon: u64, vmcs12: u64, images: &[&Vmcs12]) -> Vec<u8> {
    let header = Header {
        flags,
        format: 0,
        size: (HEADER + images.len() * IMAGE) as u32,
        vmxon_pa: vmxon,
        vmcs12_pa: vmcs12,
        smm_flags: 0,
        pad: 0,
        vmx_flags: 0,
        preemption_timer_deadline: 0,
        reserved: [0; 11],
    };
    let mut bytes = Vec::from(header.as_bytes());
    for image in images {
        bytes.extend_from_slice(image.as_bytes());
        bytes.resize(bytes.len() + IMAGE - VMCS12_BYTES, 0);
    }
    bytes
}

fn restore(
    machine: &mut Machine,
    bytes: &[u8],
    context: Context,
    memory: &Memory,
) -> Result<(Restored, Option<u64>), Refused> {
    let mut images = Images::NONE;
    let capabilities = machine.capabilities;
    let onto = Onto { context, capabilities: &capabilities, limits: &LIMITS };
    let good = check(bytes, &onto, memory, &mut images)?;
    Ok(take_over(machine, &good, &images))
}

fn restored(bytes: &[u8], context: Context) -> (Machine, Result<Restored, Refused>) {
    let mut machine = Machine::new(capabilities());
    let result = restore(&mut machine, bytes, context, &Memory::new()).map(|r| r.0);
    (machine, result)
}

fn result(bytes: &[u8]) -> Result<Restored, Refused> {
    restored(bytes, CONTEXT).1
}

fn with(bytes: &[u8], at: usize, patch: &[u8]) -> Vec<u8> {
    let mut new = Vec::from(bytes);
    new[at..at + patch.len()].copy_from_slice(patch);
    new
}

#[test]
fn a_state_comes_back_as_it_was() {
    let v = good();
    for (flags, expected) in
        [(0, Restored::L1), (flag::GUEST_MODE, Restored::L2), (3, Restored::L2)]
    {
        let bytes = state(flags, 0x1000, 0x2000, &[&v]);
        let (machine, result) = restored(&bytes, CONTEXT);
        assert_eq!(result, Ok(expected));
        let mut again = std::vec![0; LARGEST];
        let length = save(&machine, None, &mut again).unwrap();
        assert_eq!(&again[..length], &bytes[..]);
    }
}

#[test]
fn nothing_but_vmxon_is_a_state() {
    assert_eq!(result(&state(0, NOWHERE, NOWHERE, &[])), Ok(Restored::Off));
    let enlightened = state(flag::EVMCS, NOWHERE, NOWHERE, &[]);
    assert_eq!(result(&enlightened), Err(Refused::Flags), "not switched on");
    let context = Context { enlightened: true, ..CONTEXT };
    assert_eq!(restored(&enlightened, context).1, Ok(Restored::Off));
    let context = Context { offered: false, ..context };
    assert_eq!(restored(&enlightened, context).1, Err(Refused::Flags));
    let (machine, ok) = restored(&state(0, 0x1000, NOWHERE, &[]), CONTEXT);
    assert_eq!(ok, Ok(Restored::L1));
    assert_eq!((machine.vmxon(), machine.current()), (Some(Gpa(0x1000)), None));
    assert_eq!(size(&machine), HEADER);
}

#[test]
fn a_state_that_contradicts_itself_is_refused() {
    let v = good();
    let image: &[&Vmcs12] = &[&v];
    let base = state(0, 0x1000, 0x2000, image);
    let off = state(0, NOWHERE, NOWHERE, &[]);
    let cases: &[(Vec<u8>, Refused)] = &[
        (Vec::from(&base[..100]), Refused::Short),
        (with(&base, 4, &[0; 4]), Refused::Short),
        (Vec::from(&base[..500]), Refused::Missing),
        (with(&base, 0, &[2]), Refused::Flags),
        (with(&base, 0, &[0x10]), Refused::Flags),
        (with(&base, 2, &[1]), Refused::Format),
        (with(&off, 0, &[1]), Refused::Flags),
        (with(&off, 16, &[0; 8]), Refused::Address),
        (with(&off, 24, &[2]), Refused::Flags),
        (with(&base, 8, &[1]), Refused::Address),
        (with(&base, 8, &[0, 0x20]), Refused::Address),
        (with(&base, 16, &[1]), Refused::Address),
        (with(&base, 16, &[0xff; 8]), Refused::Address),
        (with(&base, 22, &[1]), Refused::Address),
        (with(&base, 24, &[2]), Refused::Flags),
        (with(&base, 28, &[2]), Refused::Flags),
        (with(&base, 0, &[4]), Refused::Flags),
        (with(&base, HEADER, &[0]), Refused::Image),
        (state(0, 0x1000, 0x2000, &[]), Refused::Address),
        (state(1, 0x1000, NOWHERE, &[]), Refused::Flags),
    ];
    for (n, (bytes, expected)) in cases.iter().enumerate() {
        assert_eq!(result(bytes), Err(*expected), "{n}");
    }
    let not_offered = Context { offered: false, ..CONTEXT };
    assert_eq!(restored(&base, not_offered).1, Err(Refused::NotOffered));
    assert_eq!(restored(&off, not_offered).1, Ok(Restored::Off));
}

#[test]
fn l2_is_restored_only_with_a_vmcs_that_could_be_entered() {
    let mut v = good();
    set!(v, GUEST_RIP = 1 << 50);
    assert_eq!(result(&state(1, 0x1000, 0x2000, &[&v])), Err(Refused::Checks));
    assert_eq!(result(&state(0, 0x1000, 0x2000, &[&v])), Ok(Restored::L1));
    let mut v = good();
    set!(v, HOST_CR0 = 0);
    let (machine, refused) = restored(&state(1, 0x1000, 0x2000, &[&v]), CONTEXT);
    assert_eq!((refused, machine.level()), (Err(Refused::Checks), Level::L1));
    assert_eq!(machine.vmxon(), None, "nothing has changed");
}

#[test]
fn what_an_entry_has_injected_is_not_injected_again() {
    let mut v = good();
    set!(v, ENTRY_INTERRUPTION = 0x8000_0306);
    let told = |flags| {
        let (machine, ok) = restored(&state(flags, 0x1000, 0x2000, &[&v]), CONTEXT);
        assert_eq!(ok, Ok(Restored::L2));
        machine.vmcs12().get(field::ENTRY_INTERRUPTION)
    };
    assert_eq!(told(flag::GUEST_MODE), 0x306);
    assert_eq!(told(flag::GUEST_MODE | flag::RUN_PENDING), 0x8000_0306);
}

#[test]
fn an_l2_that_sleeps_is_restored_awake() {
    let mut v = good();
    set!(v, GUEST_ACTIVITY = 1);
    let (machine, ok) = restored(&state(1, 0x1000, 0x2000, &[&v]), CONTEXT);
    assert_eq!((ok, machine.vmcs12().get(field::GUEST_ACTIVITY)), (Ok(Restored::L2), 0));
}

#[test]
fn the_shadow_vmcs_comes_along() {
    let memory = Memory::new();
    memory.put(0x4000, &0x91e5_7ed0u32.to_le_bytes());
    let mut v = good();
    set!(v, PROC_CONTROLS2 = 1 << 14, VMCS_LINK = 0x4000);
    let mut shadow = good();
    assert_eq!(result(&state(1, 0x1000, 0x2000, &[&v])), Err(Refused::Short));
    assert_eq!(result(&state(1, 0x1000, 0x2000, &[&v, &shadow])), Err(Refused::Image));
    shadow.as_mut_bytes()[3] |= 0x80;
    let bytes = state(1, 0x1000, 0x2000, &[&v, &shadow]);
    let mut machine = Machine::new(capabilities());
    let ok = restore(&mut machine, &bytes, CONTEXT, &memory);
    assert_eq!(ok, Ok((Restored::L2, None)));
    let mut again = std::vec![0; LARGEST];
    assert_eq!(save(&machine, None, &mut again), Some(LARGEST));
    assert_eq!(again, bytes);
    assert_eq!(save(&machine, None, &mut again[..4000]), None);
}

#[test]
fn smm_keeps_what_it_has_put_aside() {
    let v = good();
    let bytes = with(&state(0, 0x1000, 0x2000, &[&v]), 24, &[3]);
    let smm = Context { smm: true, ..CONTEXT };
    let (machine, ok) = restored(&bytes, smm);
    assert_eq!(ok, Ok(Restored::L1));
    assert!(machine.smm.vmxon && machine.smm.guest_mode);
    assert_eq!(header(&machine, None).smm_flags, 3);
    assert_eq!(restored(&bytes, CONTEXT).1, Err(Refused::Flags));
    assert_eq!(restored(&with(&bytes, 24, &[1]), smm).1, Err(Refused::Flags));
    let l2 = state(1, 0x1000, 0x2000, &[&v]);
    assert_eq!(restored(&l2, smm).1, Err(Refused::Flags));
}

#[test]
fn the_deadline_goes_along_with_l2() {
    let mut v = good();
    set!(v, PIN_CONTROLS = 0x16 | 1 << 6);
    let bytes = with(&state(1, 0x1000, 0x2000, &[&v]), 28, &[1, 0, 0, 0, 9]);
    let mut machine = Machine::new(capabilities());
    let ok = restore(&mut machine, &bytes, CONTEXT, &Memory::new());
    assert_eq!(ok, Ok((Restored::L2, Some(9))));
    assert_eq!(header(&machine, Some(9)).as_bytes(), &bytes[..HEADER]);
}
