//! What goes out comes back the same, and what a VM has not enabled is refused.

use super::*;
use alloc::vec;
use proptest::prelude::*;
use zerocopy::FromZeros;

proptest! {
    #[test]
    fn general_registers_come_back(gpr: [u64; 16], rip: u64, rflags: u64) {
        let r = Regs { gpr, rip, rflags: Rflags::from_bits_retain(rflags) };
        prop_assert_eq!(from_regs(&regs(&r)), r);
    }

    #[test]
    fn a_usable_segment_comes_back(base: u64, limit: u32, selector: u16, attr in 0u16..0x1000) {
        let s = Segment { base, limit, selector, attr: attr | x86::segment::attr::P };
        let out = segment(&s);
        prop_assert_eq!(out.unusable, 0);
        prop_assert_eq!(from_segment(&out), s);
    }

    #[test]
    fn fields_of_a_segment_are_cut_to_their_widths(bytes: [u8; 8]) {
        let [type_, present, dpl, db, s, l, g, avl] = bytes;
        let given = KvmSegment { type_, present, dpl, db, s, l, g, avl, ..Default::default() };
        prop_assert_eq!(from_segment(&given).attr & !x86::segment::attr::ALL, 0);
    }

    #[test]
    fn the_legacy_fpu_state_comes_back(seed: u64, tail: u8) {
        let mut given = KvmFpu::new_zeroed();
        given.fpr[7] = [tail; 16];
        given.xmm[0] = [tail ^ 1; 16];
        given.xmm[15] = [tail ^ 2; 16];
        given.fcw = seed as u16;
        given.fsw = (seed >> 16) as u16;
        given.ftwx = (seed >> 32) as u8;
        given.last_opcode = (seed >> 40) as u16;
        given.last_ip = seed ^ 0x1111;
        given.last_dp = seed ^ 0x2222;
        given.mxcsr = seed as u32;
        let mut area = vec![0u8; 4096];
        put(&mut area, 24, 0x1f80u32.to_le_bytes());
        put_fpu(&given, &mut area);
        prop_assert_eq!(part(&area, 24), 0x1f80u32.to_le_bytes());
        prop_assert_eq!(area[512], 3);
        prop_assert!(area[576..].iter().all(|byte| *byte == 0));
        let mut back = KvmFpu::new_zeroed();
        fpu(&area, &mut back);
        given.mxcsr = 0;
        prop_assert_eq!(back, given);
    }

    #[test]
    fn events_come_back_where_payloads_are_saved(
        nr in 0u8..32, code: Option<u32>, payload: Option<u64>, injected: bool,
        vector: Option<u8>, soft: bool, nmis in 0u32..=2, by in 0usize..3, bits: [bool; 4],
        smi: [bool; 4],
    ) {
        let [shadow, nmi_injected, nmi_masked, triple_fault] = bits;
        // An exception that was delivered has left its payload behind.
        let payload = if injected { None } else { payload };
        let saved = SavedEvents {
            exception: Some(Exception { vector: Vector(nr), error_code: code, payload }),
            exception_injected: injected,
            interrupt: vector.map(Vector),
            interrupt_soft: soft && vector.is_some(),
            interrupt_shadow: shadow,
            shadow_by: match by {
                1 if shadow => ShadowBy::Sti,
                2 if shadow => ShadowBy::MovSs,
                _ => ShadowBy::Unknown,
            },
            nmi_injected,
            nmi_pending: nmis,
            nmi_masked,
            sipi_vector: 0,
            triple_fault,
            smi: SavedSmi { smm: smi[0], pending: smi[1], inside_nmi: smi[2], latched_init: smi[3] },
        };
        let rules = EventRules { payload: true, triple_fault: true };
        let mut back = saved;
        // An SVM host cannot tell which instruction's it is.
        if shadow && saved.shadow_by == ShadowBy::Unknown {
            back.shadow_by = ShadowBy::MovSs;
        }
        prop_assert_eq!(from_events(&events(&saved, rules), rules), Ok(back));
    }

    #[test]
    fn a_cpuid_table_comes_back(rows: Vec<(u32, u32, bool, [u32; 4])>) {
        let table: Vec<cpuid::Entry> = rows
            .into_iter()
            .map(|(leaf, index, significant_index, [eax, ebx, ecx, edx])| {
                cpuid::Entry { leaf, index, significant_index, eax, ebx, ecx, edx }
            })
            .collect();
        let out = cpuid_table(&table).unwrap();
        prop_assert_eq!(from_cpuid_table(&out).unwrap(), table);
    }

    #[test]
    fn interrupt_controllers_come_back(bytes: [u8; 16], entry: u64, id: u32, count: u32) {
        let given = zerocopy::transmute!(bytes);
        let state: KvmPicState = given;
        prop_assert_eq!(pic(&from_pic(&state)), state);
        let mut state = KvmIoapicState { id, irr: count, base_address: entry, ..Default::default() };
        state.redirtbl[23] = entry;
        prop_assert_eq!(ioapic(&from_ioapic(&state)), state);
        let one = KvmPitChannelState {
            count, mode: bytes[0], gate: bytes[1], count_load_time: entry as i64,
            ..Default::default()
        };
        let channels = [Default::default(), one, Default::default()];
        let state = KvmPitState2 { channels, flags: id & 3, reserved: [0; 9] };
        prop_assert_eq!(pit(&from_pit(&state.channels, state.flags)), state);
    }
}

#[test]
fn an_unusable_segment_is_not_present() {
    let given = KvmSegment { present: 1, unusable: 1, s: 1, type_: 3, ..Default::default() };
    assert!(!from_segment(&given).is_present());
    assert_eq!(segment(&Segment::default()).unusable, 1);
}

#[test]
fn without_payloads_an_exception_that_waits_is_told_as_injected() {
    let saved = SavedEvents { exception: Some(Exception::gp(8)), ..Default::default() };
    let out = events(&saved, EventRules::default());
    assert_eq!((out.exception.injected, out.exception.pending), (1, 0));
    assert_eq!(out.flags & (VCPUEVENT_VALID_PAYLOAD | VCPUEVENT_VALID_TRIPLE_FAULT), 0);
    let out = events(&saved, EventRules { payload: true, triple_fault: false });
    assert_eq!((out.exception.injected, out.exception.pending), (0, 1));
}

#[test]
fn a_flag_that_the_vm_has_not_enabled_is_refused() {
    let with = |flags| KvmVcpuEvents { flags, ..Default::default() };
    let none = EventRules::default();
    assert_eq!(from_events(&with(VCPUEVENT_VALID_PAYLOAD), none), Err(Errno::EINVAL));
    assert_eq!(from_events(&with(VCPUEVENT_VALID_TRIPLE_FAULT), none), Err(Errno::EINVAL));
    assert_eq!(from_events(&with(VCPUEVENT_VALID_NMI_PENDING), none), Ok(Default::default()));
}

#[test]
fn routes_to_pins_need_controllers_with_pins() {
    let pin = KvmIrqRoutingEntry::to_pin(4, IRQCHIP_IOAPIC, 4);
    let msi = KvmIrqRoutingEntry::to_msi(5, 0xfee0_1000, 0x41);
    let table = from_routes(&[pin, msi], true).unwrap();
    assert_eq!(table[0].target, Target::Pin { chip: Chip::IoApic, pin: 4 });
    assert!(matches!(table[1].target, Target::Msi(m) if m.data == 0x41));
    assert_eq!(from_routes(&[pin], false), Err(Errno::EINVAL));
    assert!(from_routes(&[msi], false).is_ok());
    let nowhere = KvmIrqRoutingEntry::to_pin(4, 3, 0);
    assert_eq!(from_routes(&[nowhere], true), Err(Errno::EINVAL));
}

#[test]
fn an_ioeventfd_matches_a_value_only_where_it_says_so() {
    let what = KvmIoeventfd { datamatch: 7, addr: 0x80, len: 1, ..Default::default() };
    let event = from_ioeventfd(&what).unwrap();
    assert_eq!((event.space, event.datamatch), (Space::Memory, None));
    let flags = IOEVENTFD_FLAG_PIO | IOEVENTFD_FLAG_DATAMATCH;
    let event = from_ioeventfd(&KvmIoeventfd { flags, ..what }).unwrap();
    assert_eq!((event.space, event.datamatch), (Space::Port, Some(7)));
    let flags = IOEVENTFD_FLAG_VIRTIO_CCW_NOTIFY;
    assert_eq!(from_ioeventfd(&KvmIoeventfd { flags, ..what }), Err(Errno::EINVAL));
}
