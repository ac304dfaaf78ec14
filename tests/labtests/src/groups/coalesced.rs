//! Coalesced MMIO and port I/O: writes that wait in a ring instead of exiting (KVM API §4.116).

use kvm_bindings::*;

use crate::kvm::exit::Exit;
use crate::kvm::file::{Commands, System, Vm};
use crate::kvm::ioctl;
use crate::kvm::vcpu::Vcpu;
use crate::machine::code::{done, guest_code};
use crate::machine::guest::{Chip, Guest, Mode};
use crate::machine::layout::*;
use crate::outcome::{Answer, Outcome, Reply, equal, fail, holds};
use crate::runner::tests;

tests!("coalesced":
    both_capabilities_are_there,
    a_zone_of_an_unknown_kind_is_einval,
    zones_are_as_many_as_a_bus_has_devices,
    writes_to_ports_wait_in_the_ring,
    stores_wait_in_the_ring,
    a_string_write_waits_item_by_item,
    a_read_modify_write_exits_for_the_read_alone,
    a_write_over_the_border_of_a_zone_exits,
    a_zone_of_ports_is_none_of_memory,
    a_full_ring_exits_until_it_is_read,
    no_exit_once_unregistered_zones_are_back,
    a_zone_goes_that_covers_the_range,
    vcpus_share_one_ring,
    wrong_indexes_harm_nothing,
);

/// Entries that the page has room for; one is always free.
const ENTRIES: u32 = (4096 - 8) / 24;

fn zone(vm: &Vm, request: u64, addr: u64, size: u32, pio: u32) -> Reply {
    let mut zone = kvm_coalesced_mmio_zone { addr, size, ..Default::default() };
    zone.__bindgen_anon_1.pio = pio;
    vm.send(request, &zone)
}

fn register(vm: &Vm, addr: u64, size: u32, pio: u32) -> Outcome {
    zone(vm, ioctl::REGISTER_COALESCED_MMIO, addr, size, pio).granted("register").map(drop)
}

fn unregister(vm: &Vm, addr: u64, size: u32, pio: u32) -> Outcome {
    zone(vm, ioctl::UNREGISTER_COALESCED_MMIO, addr, size, pio).granted("unregister").map(drop)
}

/// A write in the ring.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    address: u64,
    pio: bool,
    data: Vec<u8>,
}

fn store(offset: u64, data: &[u8]) -> Entry {
    Entry { address: NOWHERE + offset, pio: false, data: data.to_vec() }
}

fn out(port: u64, data: &[u8]) -> Entry {
    Entry { address: port, pio: true, data: data.to_vec() }
}

/// The ring as a vCPU's mapping shows it.
struct Ring(*mut u32);

const FIRST: usize = 0;
const LAST: usize = 1;

impl Ring {
    fn of(vcpu: &Vcpu) -> Self {
        let page = KVM_COALESCED_MMIO_PAGE_OFFSET as usize;
        Self(vcpu.page().cast::<u8>().wrapping_add(page * 4096).cast())
    }

    fn get(&self, word: usize) -> u32 {
        assert!(word < 1024);
        // SAFETY: within the mapped page.
        unsafe { self.0.add(word).read_volatile() }
    }

    fn set(&self, word: usize, value: u32) {
        assert!(word < 1024);
        // SAFETY: within the mapped page.
        unsafe { self.0.add(word).write_volatile(value) }
    }

    fn entry(&self, index: u32) -> Entry {
        let at = 2 + index as usize * 6;
        let wide = |word| u64::from(self.get(word)) | u64::from(self.get(word + 1)) << 32;
        let data = wide(at + 4).to_le_bytes();
        let len = self.get(at + 2).min(8) as usize;
        Entry { address: wide(at), pio: self.get(at + 3) == 1, data: data[..len].to_vec() }
    }

    /// Takes all entries out.
    fn drain(&self) -> Vec<Entry> {
        let mut all = Vec::new();
        while self.get(FIRST) != self.get(LAST) && all.len() < ENTRIES as usize {
            all.push(self.entry(self.get(FIRST) % ENTRIES));
            self.set(FIRST, (self.get(FIRST) + 1) % ENTRIES);
        }
        all
    }
}

fn both_capabilities_are_there() -> Outcome {
    let system = System::open()?;
    let vm = system.create_vm()?;
    for (capability, expected) in [(KVM_CAP_COALESCED_MMIO, 2), (KVM_CAP_COALESCED_PIO, 1)] {
        equal("of the system", system.extension(capability), expected)?;
        let of_vm = vm.call(ioctl::CHECK_EXTENSION, capability.into());
        equal("of a VM", of_vm.granted("extension")?, expected)?;
    }
    Ok(())
}

fn a_zone_of_an_unknown_kind_is_einval() -> Outcome {
    let vm = System::open()?.create_vm()?;
    for request in [ioctl::REGISTER_COALESCED_MMIO, ioctl::UNREGISTER_COALESCED_MMIO] {
        for pio in [2, 3, 1 << 31, u32::MAX] {
            let answer = zone(&vm, request, NOWHERE, 8, pio);
            answer.refused(&format!("kind {pio:#x}"), libc::EINVAL)?;
        }
    }
    // What is not there, is empty or wraps is nobody's mistake.
    unregister(&vm, NOWHERE, 8, 0)?;
    for (addr, size) in [(NOWHERE, 0), (u64::MAX, 8), (0, u32::MAX)] {
        register(&vm, addr, size, 0)?;
        register(&vm, addr, size, 1)?;
    }
    Ok(())
}

fn zones_are_as_many_as_a_bus_has_devices() -> Outcome {
    let vm = System::open()?.create_vm()?;
    for n in 0..1000 {
        register(&vm, NOWHERE + n, 1, 0)?;
    }
    let answer = zone(&vm, ioctl::REGISTER_COALESCED_MMIO, NOWHERE, 1, 0);
    answer.refused("one more", libc::ENOSPC)?;
    register(&vm, 0x70, 1, 1)?;
    unregister(&vm, NOWHERE + 7, 1, 0)?;
    register(&vm, NOWHERE, 1, 0)
}

guest_code!(
    outs,
    64,
    "mov $0x87654321, %eax",
    "out %al, $0x70",
    "out %ax, $0x72",
    "out %eax, $0x70",
    "mov $0x1070, %edx",
    "out %al, %dx",
    "in $0x70, %al",
    done!()
);

fn writes_to_ports_wait_in_the_ring() -> Outcome {
    let guest = Guest::new(Chip::None, outs())?;
    register(&guest.vm, 0x70, 4, 1)?;
    register(&guest.vm, 0x1070, 1, 1)?;
    let read = Exit::Io { write: false, size: 1, port: 0x70, count: 1, data: vec![] };
    guest.expect("the first exit", read)?;
    let expected = [
        out(0x70, &[0x21]),
        out(0x72, &[0x21, 0x43]),
        out(0x70, &[0x21, 0x43, 0x65, 0x87]),
        out(0x1070, &[0x21]),
    ];
    equal("ring", Ring::of(guest.vcpu()).drain().as_slice(), expected.as_slice())?;
    guest.finish()
}

guest_code!(
    stores,
    64,
    "mov $NOWHERE, %ebx",
    "movabs $0x1122334455667788, %rax",
    "mov %al, 1(%rbx)",
    "mov %ax, 2(%rbx)",
    "mov %eax, 4(%rbx)",
    "mov %rax, 8(%rbx)",
    "movl $0x12345678, (%rbx)",
    "mov (%rbx), %eax",
    done!()
);

fn stores_wait_in_the_ring() -> Outcome {
    let guest = Guest::new(Chip::None, stores())?;
    register(&guest.vm, NOWHERE, 0x10, 0)?;
    guest.expect("the first exit", Exit::mmio(false, NOWHERE, &[0; 4]))?;
    let all = [0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11];
    let expected = [
        store(1, &all[..1]),
        store(2, &all[..2]),
        store(4, &all[..4]),
        store(8, &all),
        store(0, &[0x78, 0x56, 0x34, 0x12]),
    ];
    equal("ring", Ring::of(guest.vcpu()).drain().as_slice(), expected.as_slice())?;
    guest.finish()
}

guest_code!(
    string_writes,
    64,
    "cld",
    "mov $FREE, %esi",
    "mov $0x3f8, %edx",
    "mov $5, %ecx",
    "rep outsb",
    "mov $FREE, %esi",
    "mov $NOWHERE, %edi",
    "mov $2, %ecx",
    "rep movsw",
    "mov %rcx, RESULT",
    done!()
);

fn a_string_write_waits_item_by_item() -> Outcome {
    let guest = Guest::new(Chip::None, string_writes())?;
    guest.memory.write_bytes(FREE, b"hello");
    register(&guest.vm, 0x3f8, 1, 1)?;
    register(&guest.vm, NOWHERE, 4, 0)?;
    guest.finish()?;
    let mut expected: Vec<Entry> = b"hello".iter().map(|byte| out(0x3f8, &[*byte])).collect();
    expected.extend([store(0, b"he"), store(2, b"ll")]);
    equal("ring", Ring::of(guest.vcpu()).drain(), expected)?;
    equal("rcx", guest.result(0), 0)
}

guest_code!(modify, 64, "mov $NOWHERE, %ebx", "addl $3, (%rbx)", done!());

fn a_read_modify_write_exits_for_the_read_alone() -> Outcome {
    let guest = Guest::new(Chip::None, modify())?;
    register(&guest.vm, NOWHERE, 4, 0)?;
    guest.expect("read", Exit::mmio(false, NOWHERE, &[0; 4]))?;
    guest.vcpu().answer(&[4, 0, 0, 0]);
    guest.finish()?;
    equal("ring", Ring::of(guest.vcpu()).drain(), vec![store(0, &[7, 0, 0, 0])])
}

guest_code!(
    over_borders,
    64,
    "mov $NOWHERE, %ebx",
    "mov $0x04030201, %eax",
    "mov %eax, 2(%rbx)",
    "mov %eax, 6(%rbx)",
    "mov %eax, 4(%rbx)",
    "out %ax, $0x70",
    "out %al, $0x71",
    "out %al, $0x70",
    done!()
);

fn a_write_over_the_border_of_a_zone_exits() -> Outcome {
    let guest = Guest::new(Chip::None, over_borders())?;
    register(&guest.vm, NOWHERE + 4, 4, 0)?;
    register(&guest.vm, 0x70, 1, 1)?;
    guest.expect("from before", Exit::mmio(true, NOWHERE + 2, &[1, 2, 3, 4]))?;
    guest.expect("beyond", Exit::mmio(true, NOWHERE + 6, &[1, 2, 3, 4]))?;
    let exit = |size, port, data: &[u8]| Exit::Io {
        write: true,
        size,
        port,
        count: 1,
        data: data.to_vec(),
    };
    guest.expect("too wide", exit(2, 0x70, &[1, 2]))?;
    guest.expect("behind", exit(1, 0x71, &[1]))?;
    guest.finish()?;
    let expected = vec![store(4, &[1, 2, 3, 4]), out(0x70, &[1])];
    equal("ring", Ring::of(guest.vcpu()).drain(), expected)
}

guest_code!(
    both_spaces,
    64,
    "mov $0x5a, %al",
    "mov $NOWHERE, %ebx",
    "mov %al, (%rbx)",
    "out %al, $0x70",
    done!()
);

fn a_zone_of_ports_is_none_of_memory() -> Outcome {
    let guest = Guest::new(Chip::None, both_spaces())?;
    register(&guest.vm, NOWHERE, 1, 1)?;
    register(&guest.vm, 0x70, 1, 0)?;
    guest.expect("store", Exit::mmio(true, NOWHERE, &[0x5a]))?;
    let exit = Exit::Io { write: true, size: 1, port: 0x70, count: 1, data: vec![0x5a] };
    guest.expect("out", exit)?;
    guest.finish()?;
    equal("ring", Ring::of(guest.vcpu()).drain(), vec![])
}

guest_code!(
    counting,
    64,
    "mov $NOWHERE, %ebx",
    "xor %eax, %eax",
    "0: mov %eax, (%rbx)",
    "out %eax, $0x70",
    "inc %eax",
    "cmp $400, %eax",
    "jne 0b",
    done!()
);

/// The number in an entry or an exit of `counting`.
fn number(data: &[u8]) -> u32 {
    u32::from_le_bytes(data[..4].try_into().unwrap_or_default())
}

/// Every write comes once, in order, by the ring or by an exit, which happens when the ring is full.
fn a_full_ring_exits_until_it_is_read() -> Outcome {
    let guest = Guest::new(Chip::None, counting())?;
    register(&guest.vm, NOWHERE, 4, 0)?;
    register(&guest.vm, 0x70, 4, 1)?;
    let ring = Ring::of(guest.vcpu());
    let mut writes = Vec::new();
    let mut exits = 0;
    loop {
        let exit = guest.exit()?;
        let waiting = ring.drain();
        let ended = exit.is_out(PORT_DONE);
        // Older versions of the stock module call a half full ring full.
        let full = (ENTRIES / 2..ENTRIES).contains(&(waiting.len() as u32));
        holds("a full ring", full || ended, waiting.len())?;
        writes.extend(waiting.iter().map(|entry| (entry.pio, number(&entry.data))));
        match exit {
            _ if ended => break,
            Exit::Mmio { write: true, address: NOWHERE, len: 4, data } => {
                writes.push((false, number(&data)));
            }
            Exit::Io { write: true, size: 4, port: 0x70, data, .. } => {
                writes.push((true, number(&data)));
            }
            exit => return fail(format!("expected a write got {exit:x?}")),
        }
        exits += 1;
    }
    holds("an exit when the ring was full", (4..10).contains(&exits), exits)?;
    let expected: Vec<_> = (0..400).flat_map(|n| [(false, n), (true, n)]).collect();
    holds("every write once, in order", writes == expected, writes)
}

guest_code!(
    rounds,
    64,
    "mov $NOWHERE, %ebx",
    "0: inc %eax",
    "mov %al, (%rbx)",
    "out %al, $0x70",
    "out %al, $PORT_MARK",
    "jmp 0b",
);

/// One round: whether the store exited, and whether the port write did.
fn round(guest: &Guest) -> Outcome<(bool, bool)> {
    let mut exited = (false, false);
    loop {
        match guest.exit()? {
            Exit::Mmio { write: true, address: NOWHERE, .. } if !exited.0 => exited.0 = true,
            exit if exit.is_out(0x70) && !exited.1 => exited.1 = true,
            exit if exit.is_out(PORT_MARK) => return Ok(exited),
            exit => return fail(format!("expected a round's exit got {exit:x?}")),
        }
    }
}

fn no_exit_once_unregistered_zones_are_back() -> Outcome {
    let guest = Guest::new(Chip::None, rounds())?;
    let ring = Ring::of(guest.vcpu());
    for _ in 0..3 {
        for _ in 0..3 {
            equal("without zones", round(&guest)?, (true, true))?;
        }
        register(&guest.vm, NOWHERE, 1, 0)?;
        for _ in 0..3 {
            equal("with one zone", round(&guest)?, (false, true))?;
        }
        register(&guest.vm, 0x70, 1, 1)?;
        for _ in 0..3 {
            equal("with both", round(&guest)?, (false, false))?;
        }
        equal("entries", ring.drain().len(), 9)?;
        unregister(&guest.vm, NOWHERE, 1, 0)?;
        equal("with the other", round(&guest)?, (true, false))?;
        unregister(&guest.vm, 0x70, 1, 1)?;
        equal("entries", ring.drain().len(), 1)?;
    }
    Ok(())
}

fn a_zone_goes_that_covers_the_range() -> Outcome {
    let guest = Guest::new(Chip::None, rounds())?;
    register(&guest.vm, NOWHERE, 0x1000, 0)?;
    register(&guest.vm, NOWHERE - 0x1000, 0x2000, 0)?;
    register(&guest.vm, 0x70, 1, 1)?;
    for (addr, size, pio) in [
        (NOWHERE, 0x1001, 0),
        (NOWHERE - 0x2000, 0x10_0000, 0),
        (NOWHERE, 1, 1),
        (0x70, 1, 0),
        (0x70, 2, 1),
    ] {
        unregister(&guest.vm, addr, size, pio)?;
        equal("zones stay", round(&guest)?, (false, false))?;
    }
    unregister(&guest.vm, NOWHERE - 1, 2, 0)?;
    equal("one is left", round(&guest)?, (false, false))?;
    unregister(&guest.vm, NOWHERE + 0x800, 1, 0)?;
    equal("none is left", round(&guest)?, (true, false))
}

fn vcpus_share_one_ring() -> Outcome {
    let guest = Guest::with_vcpus(Chip::None, Mode::Long, 2, both_spaces())?;
    register(&guest.vm, NOWHERE, 1, 0)?;
    register(&guest.vm, 0x70, 1, 1)?;
    guest.finish_of(0)?;
    guest.finish_of(1)?;
    let [first, second] = [0, 1].map(|index: usize| Ring::of(&guest.vcpus[index]));
    equal("last", (first.get(LAST), second.get(LAST)), (4, 4))?;
    let once = [store(0, &[0x5a]), out(0x70, &[0x5a])];
    let expected = [once.clone(), once].concat();
    equal("ring", first.drain(), expected)?;
    equal("first", second.get(FIRST), 4)
}

fn wrong_indexes_harm_nothing() -> Outcome {
    let guest = Guest::new(Chip::None, rounds())?;
    register(&guest.vm, NOWHERE, 1, 0)?;
    register(&guest.vm, 0x70, 1, 1)?;
    let ring = Ring::of(guest.vcpu());
    for bad in [ENTRIES, ENTRIES + 1, 0xff, 0x100, 0x7fff_ffff, 1 << 31, u32::MAX] {
        ring.set(FIRST, 0);
        ring.set(LAST, bad);
        for _ in 0..3 {
            equal(&format!("last is {bad:#x}"), round(&guest)?, (true, true))?;
        }
        equal("last", ring.get(LAST), bad)?;
        // Whether there is room then, the versions of the stock module see differently.
        ring.set(FIRST, bad);
        ring.set(LAST, ENTRIES - 1);
        for _ in 0..3 {
            round(&guest)?;
        }
        holds("an index", ring.get(LAST) < ENTRIES, ring.get(LAST))?;
        ring.set(FIRST, 0);
        ring.set(LAST, 0);
        equal("a sound ring", round(&guest)?, (false, false))?;
        equal("entries", ring.drain().len(), 2)?;
    }
    Ok(())
}
