//! MSRs that are only values, against their table: whose an MSR is, what a refused access leaves, what a write reaches, and
//! that what a VMM saves can be restored.

use gannet_msr::{By, Class, Effect, GuestFacts, HostMsrs, MsrStore, Refused, classify, rows};
use x86::Reset;

use crate::bytes::Bytes;

/// All MSRs of the table, with their rows.
fn all() -> impl Iterator<Item = (u32, &'static str, &'static rows::Row)> {
    rows::TABLE.iter().flat_map(|section| {
        let title = section.about;
        section
            .rows
            .iter()
            .flat_map(move |row| (row.first..=row.last).map(move |i| (i, title, row)))
    })
}

/// Sections of the table whose MSRs the store keeps.
fn is_kept(about: &str) -> bool {
    about.starts_with("Kept") || about.starts_with("Without a slot")
}

fn facts(bytes: &mut Bytes<'_>) -> GuestFacts {
    let bits = bytes.u32();
    let on = |n: u32| bits >> n & 1 == 1;
    GuestFacts {
        spec_ctrl: (bits & 7) as u16,
        host_spec_ctrl: 0x87,
        pred_cmd: if on(3) { 1 } else { 0 },
        host_pred_cmd: if on(4) { 0x81 } else { 0 },
        maxphyaddr: [36, 40, 48, 52][(bits >> 5 & 3) as usize],
        amd: on(7),
        flush_l1d: on(8),
        host_flush_l1d: on(9),
        tsc_adjust: on(10),
        arch_capabilities: on(11),
        pdcm: on(12),
        osvw: on(13),
        virt_ssbd: on(14),
        sse3: on(15),
        vmx: on(16),
        tsc_ratio: on(17),
    }
}

/// What a VMM reads of each.
fn image(store: &MsrStore, facts: &GuestFacts) -> Vec<(u32, Result<u64, Refused>)> {
    all().map(|(index, _, _)| (index, store.read(index, By::Vmm, facts))).collect()
}

/// What a row's plain words say of a write; `None` where a rule of its own decides.
fn plainly(row: &rows::Row, value: u64, by: By) -> Option<bool> {
    match row.write {
        "refused" => Some(false),
        "ignored" | "any" => Some(true),
        "zero" => Some(value == 0),
        "any if vmm" => Some(by == By::Vmm),
        "zero if vmm" => Some(by == By::Vmm && value == 0),
        _ => None,
    }
}

pub fn run(bytes: &[u8]) {
    let bytes = &mut Bytes::new(bytes);
    let bits = bytes.u8();
    let host = HostMsrs {
        amd: bits & 1 != 0,
        arch_capabilities: 0x61,
        de_cfg: u64::from(bits >> 1 & 2),
        ..HostMsrs::default()
    };
    let facts = facts(bytes);
    let list: Vec<_> = all().collect();
    let mut store = MsrStore::new(&host).unwrap();
    let mut steps = 0;
    while !bytes.is_empty() && steps < 100 {
        steps += 1;
        let op = bytes.u8();
        let by = if op & 1 == 0 { By::Guest } else { By::Vmm };
        match op >> 1 & 31 {
            30 => {
                store.reset(if op & 1 == 0 { Reset::Init } else { Reset::PowerUp });
                continue;
            }
            31 => {
                let cap = bytes.value();
                let before = image(&store, &facts);
                if store.set_up_mce(cap).is_err() {
                    assert_eq!(image(&store, &facts), before);
                }
                continue;
            }
            _ => {}
        }
        let any = bytes.u16();
        let (index, row) = match list.get(usize::from(any) % (list.len() + 8)) {
            Some((index, about, row)) => {
                let kept = matches!(classify(*index), Class::Store | Class::Outside);
                assert_eq!(kept, is_kept(about), "{index:#x}");
                (*index, Some(*row).filter(|_| kept))
            }
            None => (bytes.u32(), None),
        };
        let value = bytes.value();
        let before = image(&store, &facts);
        let was = store.read(index, by, &facts);
        let done = store.write(index, value, by, &facts);
        let after = image(&store, &facts);
        if row.is_none() && !list.iter().any(|(known, ..)| *known == index) {
            assert_eq!((was, done), (Err(Refused), Err(Refused)), "{index:#x} is nobody's");
        }
        if let Some(row) = row {
            // A VMM may restore a zero to what the list names.
            let restores = by == By::Vmm && value == 0 && row.is_saved;
            if let Some(taken) = plainly(row, value, by).filter(|_| !restores) {
                assert_eq!(done.is_ok(), taken, "{index:#x} = {value:#x}, {}", row.write);
            }
        }
        for ((at, old), (_, new)) in before.iter().zip(&after) {
            if *at != index || done.is_err() {
                assert_eq!(old, new, "{at:#x} by a write of {value:#x} to {index:#x}, {by:?}");
            }
        }
        if let Ok(Effect::TscAdjusted { delta }) = done {
            assert_eq!(was.map(|was| was.wrapping_add(delta as u64)), Ok(value));
        }
        if by == By::Guest && was == Err(Refused) && store.read(index, By::Guest, &facts).is_ok() {
            panic!("{index:#x} came to be for the guest by a write of its own");
        }
    }
    migrate(&store, &host, &facts);
}

/// What a VMM reads of a store it can write to another, which then reads the same.
fn migrate(from: &MsrStore, host: &HostMsrs, facts: &GuestFacts) {
    let mut to = MsrStore::new(host).unwrap();
    let cap = from.read(x86::msr::MCG_CAP, By::Vmm, facts).unwrap();
    to.set_up_mce(cap).unwrap();
    let saved: Vec<u32> = gannet_msr::lists::saved(host)
        .filter(|index| matches!(classify(*index), Class::Store | Class::Outside))
        .collect();
    for index in &saved {
        let value = from.read(*index, By::Vmm, facts);
        let value = value.unwrap_or_else(|_| panic!("{index:#x} is listed and cannot be read"));
        let done = to.write(*index, value, By::Vmm, facts);
        assert!(done.is_ok(), "{index:#x} = {value:#x} was saved and is refused");
    }
    for index in saved {
        assert_eq!(to.read(index, By::Vmm, facts), from.read(index, By::Vmm, facts), "{index:#x}");
    }
}
