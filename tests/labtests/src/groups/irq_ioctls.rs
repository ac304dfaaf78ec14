//! What the commands around interrupts refuse (KVM API §4.25 to §4.27, §4.52, §4.59, §4.71, §4.75).

use std::os::fd::{AsRawFd, OwnedFd};

use kvm_bindings::*;

use crate::kvm::file::{Commands, System, Vm, own};
use crate::kvm::ioctl;
use crate::machine::threads::eventually;
use crate::outcome::{Answer, Errno, Outcome, Reply, equal, holds, one_of};
use crate::runner::tests;

tests!("irq_ioctls":
    an_irq_line_needs_an_irqchip,
    an_irq_line_out_of_range_does_nothing,
    an_irq_line_reports_its_status,
    routes_need_an_irqchip,
    routes_of_unknown_types_or_flags_are_einval,
    routes_beyond_the_chips_are_einval,
    too_many_routes_are_einval,
    a_refused_table_of_routes_changes_nothing,
    an_irqfd_wants_an_eventfd,
    an_irqfd_beyond_the_routes_does_no_harm,
    an_irqfd_with_unknown_flags_is_einval,
    a_duplicate_irqfd_is_ebusy,
    an_irqfd_that_was_never_assigned_may_be_taken_away,
    an_irqfd_can_be_assigned_anew,
    an_irqfd_whose_eventfd_is_closed_goes_away,
    an_ioeventfd_wants_an_eventfd,
    an_ioeventfd_of_a_wrong_length_is_einval,
    an_ioeventfd_with_unknown_flags_is_einval,
    an_ioeventfd_that_wraps_is_einval,
    a_duplicate_ioeventfd_is_eexist,
    an_unknown_ioeventfd_is_enoent,
    an_unknown_chip_is_einval,
    the_chips_are_read_back,
    the_pit_is_read_back,
    a_pit_that_is_not_there_is_enxio,
    a_message_without_irqchip_is_refused,
    a_message_with_unknown_flags_is_einval,
);

fn vm(irqchip: bool) -> Outcome<Vm> {
    let vm = System::open()?.create_vm()?;
    if irqchip {
        vm.call(ioctl::CREATE_IRQCHIP, 0).granted("KVM_CREATE_IRQCHIP")?;
    }
    Ok(vm)
}

fn eventfd() -> OwnedFd {
    // SAFETY: plain numbers.
    own(unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) })
}

fn an_irq_line_needs_an_irqchip() -> Outcome {
    vm(false)?.irq_line(4, 1).refused("KVM_IRQ_LINE", libc::ENXIO)
}

fn an_irq_line_out_of_range_does_nothing() -> Outcome {
    let vm = vm(true)?;
    // No route leads there: nothing happens, with an error or without. The stock module has none.
    for gsi in [24, 1023, 4096, u32::MAX] {
        one_of(&format!("gsi {gsi}"), vm.irq_line(gsi, 1), &[Ok(0), Err(Errno(libc::EINVAL))])?;
    }
    vm.irq_line(4, 1).granted("gsi 4")?;
    vm.irq_line(4, 0).granted("gsi 4 down").map(drop)
}

fn an_irq_line_reports_its_status() -> Outcome {
    let vm = vm(true)?;
    let _vcpu = vm.create_vcpu(0)?;
    let mut line = kvm_irq_level { level: 1, ..Default::default() };
    line.__bindgen_anon_1.irq = 5;
    vm.exchange(ioctl::IRQ_LINE_STATUS, &mut line).granted("KVM_IRQ_LINE_STATUS")?;
    // SAFETY: integers.
    let status = unsafe { line.__bindgen_anon_1.status };
    // Masked in both controllers: remembered by the PIC.
    holds("a status of -1 to 1", (-1..=1).contains(&status), status)
}

#[repr(C)]
struct Routes {
    nr: u32,
    flags: u32,
    entries: [kvm_irq_routing_entry; 8],
}

fn chip_route(gsi: u32, irqchip: u32, pin: u32) -> kvm_irq_routing_entry {
    let mut entry =
        kvm_irq_routing_entry { gsi, type_: KVM_IRQ_ROUTING_IRQCHIP, ..Default::default() };
    entry.u.irqchip = kvm_irq_routing_irqchip { irqchip, pin };
    entry
}

fn msi_route(gsi: u32) -> kvm_irq_routing_entry {
    let mut entry = kvm_irq_routing_entry { gsi, type_: KVM_IRQ_ROUTING_MSI, ..Default::default() };
    entry.u.msi = kvm_irq_routing_msi { address_lo: 0xfee0_0000, data: 0x40, ..Default::default() };
    entry
}

fn set_routes(vm: &Vm, list: &[kvm_irq_routing_entry]) -> Reply {
    let mut routes = Routes { nr: list.len() as u32, flags: 0, entries: [Default::default(); 8] };
    routes.entries[..list.len()].copy_from_slice(list);
    vm.send(ioctl::SET_GSI_ROUTING, &routes)
}

fn routes_need_an_irqchip() -> Outcome {
    set_routes(&vm(false)?, &[msi_route(0)]).refused("KVM_SET_GSI_ROUTING", libc::EINVAL)
}

fn routes_of_unknown_types_or_flags_are_einval() -> Outcome {
    let vm = vm(true)?;
    set_routes(&vm, &[kvm_irq_routing_entry { type_: 77, ..msi_route(1) }])
        .refused("type 77", libc::EINVAL)?;
    set_routes(&vm, &[kvm_irq_routing_entry { type_: 0, ..msi_route(1) }])
        .refused("type 0", libc::EINVAL)?;
    set_routes(&vm, &[kvm_irq_routing_entry { flags: 1 << 5, ..msi_route(1) }])
        .refused("flags of a route", libc::EINVAL)?;
    set_routes(&vm, &[kvm_irq_routing_entry { flags: 1, ..chip_route(1, 2, 1) }])
        .refused("flags of a chip's route", libc::EINVAL)?;
    let routes = Routes { nr: 0, flags: 1, entries: [Default::default(); 8] };
    vm.send(ioctl::SET_GSI_ROUTING, &routes).refused("flags of the table", libc::EINVAL)?;
    set_routes(&vm, &[msi_route(1), chip_route(4, 2, 4), chip_route(4, 0, 4)])
        .granted("a good table")
        .map(drop)
}

fn routes_beyond_the_chips_are_einval() -> Outcome {
    let vm = vm(true)?;
    set_routes(&vm, &[chip_route(1, 7, 0)]).refused("chip 7", libc::EINVAL)?;
    set_routes(&vm, &[chip_route(1, 2, 24)]).refused("pin 24", libc::EINVAL)?;
    set_routes(&vm, &[chip_route(1, 0, 8)]).refused("pin 8 of the PIC", libc::EINVAL)?;
    set_routes(&vm, &[msi_route(4096)]).refused("gsi 4096", libc::EINVAL)
}

fn too_many_routes_are_einval() -> Outcome {
    let vm = vm(true)?;
    for nr in [4097, u32::MAX] {
        let routes = Routes { nr, flags: 0, entries: [Default::default(); 8] };
        let answer = vm.send(ioctl::SET_GSI_ROUTING, &routes);
        answer.refused(&format!("{nr} routes"), libc::EINVAL)?;
    }
    Ok(())
}

fn a_refused_table_of_routes_changes_nothing() -> Outcome {
    let vm = vm(true)?;
    let _vcpu = vm.create_vcpu(0)?;
    set_routes(&vm, &[msi_route(3)]).granted("a good table")?;
    set_routes(&vm, &[chip_route(5, 2, 5), chip_route(1, 9, 9)]).refused("bad", libc::EINVAL)?;
    let event = eventfd();
    irqfd(&vm, event.as_raw_fd(), 3, 0).granted("an irqfd of the good table").map(drop)
}

fn irqfd(vm: &Vm, fd: i32, gsi: u32, flags: u32) -> Reply {
    vm.send(ioctl::IRQFD, &kvm_irqfd { fd: fd as u32, gsi, flags, ..Default::default() })
}

fn an_irqfd_wants_an_eventfd() -> Outcome {
    let vm = vm(true)?;
    irqfd(&vm, 0x7fff_fff0, 4, 0).refused("a closed file", libc::EBADF)?;
    irqfd(&vm, -1, 4, 0).refused("-1", libc::EBADF)?;
    irqfd(&vm, vm.descriptor(), 4, 0).refused("a VM", libc::EINVAL)?;
    let event = eventfd();
    let resample = kvm_irqfd {
        fd: event.as_raw_fd() as u32,
        gsi: 4,
        flags: KVM_IRQFD_FLAG_RESAMPLE,
        resamplefd: 0x7fff_fff0,
        ..Default::default()
    };
    vm.send(ioctl::IRQFD, &resample).refused("a closed resamplefd", libc::EBADF)
}

fn an_irqfd_beyond_the_routes_does_no_harm() -> Outcome {
    let vm = vm(true)?;
    let event = eventfd();
    // The stock module takes it, for routes that may come.
    for gsi in [4096, u32::MAX] {
        let answer = irqfd(&vm, event.as_raw_fd(), gsi, 0);
        one_of(&format!("gsi {gsi}"), answer, &[Ok(0), Err(Errno(libc::EINVAL))])?;
        irqfd(&vm, event.as_raw_fd(), gsi, KVM_IRQFD_FLAG_DEASSIGN).granted("deassign")?;
    }
    Ok(())
}

fn an_irqfd_with_unknown_flags_is_einval() -> Outcome {
    let vm = vm(true)?;
    let event = eventfd();
    for flags in [1 << 2, 1 << 31] {
        let answer = irqfd(&vm, event.as_raw_fd(), 4, flags);
        answer.refused(&format!("flags {flags:#x}"), libc::EINVAL)?;
    }
    Ok(())
}

fn a_duplicate_irqfd_is_ebusy() -> Outcome {
    let vm = vm(true)?;
    let event = eventfd();
    irqfd(&vm, event.as_raw_fd(), 4, 0).granted("first")?;
    irqfd(&vm, event.as_raw_fd(), 4, 0).refused("again", libc::EBUSY)?;
    irqfd(&vm, event.as_raw_fd(), 5, 0).refused("for another gsi", libc::EBUSY)?;
    irqfd(&vm, eventfd().as_raw_fd(), 4, 0).granted("another eventfd").map(drop)
}

fn an_irqfd_that_was_never_assigned_may_be_taken_away() -> Outcome {
    let vm = vm(true)?;
    let event = eventfd();
    irqfd(&vm, event.as_raw_fd(), 4, KVM_IRQFD_FLAG_DEASSIGN).granted("deassign")?;
    irqfd(&vm, 0x7fff_fff0, 4, KVM_IRQFD_FLAG_DEASSIGN).refused("a closed file", libc::EBADF)
}

fn an_irqfd_can_be_assigned_anew() -> Outcome {
    let vm = vm(true)?;
    let event = eventfd();
    for gsi in [4, 4, 5] {
        irqfd(&vm, event.as_raw_fd(), gsi, 0).granted("assign")?;
        irqfd(&vm, event.as_raw_fd(), gsi, KVM_IRQFD_FLAG_DEASSIGN).granted("deassign")?;
    }
    Ok(())
}

fn an_irqfd_whose_eventfd_is_closed_goes_away() -> Outcome {
    let vm = vm(true)?;
    for _ in 0..20 {
        let event = eventfd();
        irqfd(&vm, event.as_raw_fd(), 4, 0).granted("assign")?;
        // Closed while assigned: a new eventfd of the same number is another one.
    }
    let event = eventfd();
    eventually("the number can be assigned", || irqfd(&vm, event.as_raw_fd(), 4, 0).is_ok())
}

fn ioeventfd(vm: &Vm, fd: i32, addr: u64, len: u32, flags: u32, datamatch: u64) -> Reply {
    let request = kvm_ioeventfd { datamatch, addr, len, fd, flags, ..Default::default() };
    vm.send(ioctl::IOEVENTFD, &request)
}

const PIO: u32 = 1 << kvm_ioeventfd_flag_nr_pio;
const MATCH: u32 = 1 << kvm_ioeventfd_flag_nr_datamatch;
const DEASSIGN: u32 = 1 << kvm_ioeventfd_flag_nr_deassign;

fn an_ioeventfd_wants_an_eventfd() -> Outcome {
    let vm = vm(false)?;
    ioeventfd(&vm, 0x7fff_fff0, 0x1000, 4, 0, 0).refused("a closed file", libc::EBADF)?;
    ioeventfd(&vm, vm.descriptor(), 0x1000, 4, 0, 0).refused("a VM", libc::EINVAL)
}

fn an_ioeventfd_of_a_wrong_length_is_einval() -> Outcome {
    let vm = vm(false)?;
    let event = eventfd();
    for len in [3, 5, 6, 7, 9, 16, u32::MAX] {
        let answer = ioeventfd(&vm, event.as_raw_fd(), 0x1000, len, 0, 0);
        answer.refused(&format!("length {len}"), libc::EINVAL)?;
    }
    ioeventfd(&vm, event.as_raw_fd(), 0x1000, 0, MATCH, 0).refused("0 with data", libc::EINVAL)?;
    for len in [0, 1, 2, 4, 8] {
        let at = 0x1000 + u64::from(len) * 0x10;
        ioeventfd(&vm, event.as_raw_fd(), at, len, 0, 0).granted(&format!("length {len}"))?;
    }
    Ok(())
}

fn an_ioeventfd_with_unknown_flags_is_einval() -> Outcome {
    let vm = vm(false)?;
    let event = eventfd();
    for flags in [1 << 5, 1 << 31] {
        let answer = ioeventfd(&vm, event.as_raw_fd(), 0x1000, 4, flags, 0);
        answer.refused(&format!("flags {flags:#x}"), libc::EINVAL)?;
    }
    Ok(())
}

fn an_ioeventfd_that_wraps_is_einval() -> Outcome {
    let vm = vm(false)?;
    let event = eventfd();
    ioeventfd(&vm, event.as_raw_fd(), u64::MAX - 3, 8, 0, 0).refused("8 at -4", libc::EINVAL)
}

fn a_duplicate_ioeventfd_is_eexist() -> Outcome {
    let vm = vm(false)?;
    let (event, other) = (eventfd(), eventfd());
    ioeventfd(&vm, event.as_raw_fd(), 0x1000, 4, MATCH, 1).granted("first")?;
    ioeventfd(&vm, event.as_raw_fd(), 0x1000, 4, MATCH, 1).refused("again", libc::EEXIST)?;
    ioeventfd(&vm, other.as_raw_fd(), 0x1000, 4, MATCH, 1).refused("other file", libc::EEXIST)?;
    ioeventfd(&vm, other.as_raw_fd(), 0x1000, 4, 0, 0).refused("without data", libc::EEXIST)?;
    ioeventfd(&vm, event.as_raw_fd(), 0x1000, 4, MATCH, 2).granted("other data")?;
    ioeventfd(&vm, event.as_raw_fd(), 0x1004, 4, MATCH, 1).granted("other address")?;
    ioeventfd(&vm, event.as_raw_fd(), 0x1000, 4, MATCH | PIO, 1).granted("a port").map(drop)
}

fn an_unknown_ioeventfd_is_enoent() -> Outcome {
    let vm = vm(false)?;
    let (event, other) = (eventfd(), eventfd());
    let gone = |fd: &OwnedFd, at| ioeventfd(&vm, fd.as_raw_fd(), at, 4, MATCH | DEASSIGN, 7);
    gone(&event, 0x1000).refused("never assigned", libc::ENOENT)?;
    ioeventfd(&vm, event.as_raw_fd(), 0x1000, 4, MATCH, 7).granted("assign")?;
    gone(&other, 0x1000).refused("another file", libc::ENOENT)?;
    gone(&event, 0x1004).refused("another address", libc::ENOENT)?;
    gone(&event, 0x1000).granted("deassign")?;
    gone(&event, 0x1000).refused("twice", libc::ENOENT)?;
    gone_closed(&vm)
}

fn gone_closed(vm: &Vm) -> Outcome {
    ioeventfd(vm, 0x7fff_fff0, 0x1000, 4, DEASSIGN, 0).refused("a closed file", libc::EBADF)
}

fn irqchip(vm: &Vm, chip_id: u32) -> Result<kvm_irqchip, Errno> {
    let mut chip = kvm_irqchip { chip_id, ..Default::default() };
    vm.exchange(ioctl::GET_IRQCHIP, &mut chip)?;
    Ok(chip)
}

fn an_unknown_chip_is_einval() -> Outcome {
    let vm = vm(true)?;
    for id in [3, 99, u32::MAX] {
        irqchip(&vm, id).map(drop).refused(&format!("get chip {id}"), libc::EINVAL)?;
        let chip = kvm_irqchip { chip_id: id, ..Default::default() };
        let answer = vm.send(ioctl::SET_IRQCHIP, &chip);
        answer.refused(&format!("set chip {id}"), libc::EINVAL)?;
    }
    let without = self::vm(false)?;
    irqchip(&without, 0).map(drop).refused("get without irqchip", libc::ENXIO)?;
    let chip = kvm_irqchip::default();
    without.send(ioctl::SET_IRQCHIP, &chip).refused("set without irqchip", libc::ENXIO)
}

fn the_chips_are_read_back() -> Outcome {
    let vm = vm(true)?;
    // SAFETY: the ids say which member of the union is meant; all are integers.
    unsafe {
        for id in [KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE] {
            let mut chip = irqchip(&vm, id).map_err(|_| ()).unwrap_or_default();
            chip.chip.pic.imr = 0xa5;
            chip.chip.pic.irq_base = 0x30;
            vm.send(ioctl::SET_IRQCHIP, &chip).granted("set PIC")?;
            let after = irqchip(&vm, id).map_err(|_| ()).unwrap_or_default();
            let got = (after.chip.pic.imr, after.chip.pic.irq_base);
            equal("mask and base", got, (0xa5, 0x30))?;
        }
        let mut chip = irqchip(&vm, KVM_IRQCHIP_IOAPIC).map_err(|_| ()).unwrap_or_default();
        equal("I/O APIC's base", chip.chip.ioapic.base_address, 0xfec0_0000)?;
        equal("pin 5 masked", chip.chip.ioapic.redirtbl[5].bits >> 16 & 1, 1)?;
        chip.chip.ioapic.redirtbl[5].bits = 0x0300_0000_0000_8841;
        chip.chip.ioapic.ioregsel = 0x12;
        vm.send(ioctl::SET_IRQCHIP, &chip).granted("set I/O APIC")?;
        let after = irqchip(&vm, KVM_IRQCHIP_IOAPIC).map_err(|_| ()).unwrap_or_default();
        equal("pin 5", after.chip.ioapic.redirtbl[5].bits, 0x0300_0000_0000_8841)?;
        equal("selector", after.chip.ioapic.ioregsel, 0x12)
    }
}

fn the_pit_is_read_back() -> Outcome {
    let vm = vm(true)?;
    vm.send(ioctl::CREATE_PIT2, &kvm_pit_config::default()).granted("KVM_CREATE_PIT2")?;
    let mut state: kvm_pit_state2 = vm.receive(ioctl::GET_PIT2).granted("get")?;
    equal("count after reset", state.channels[0].count, 0x10000)?;
    state.channels[1].count = 0x1234;
    state.channels[1].mode = 2;
    state.channels[2].count = 0x4321;
    state.flags = KVM_PIT_FLAGS_HPET_LEGACY;
    vm.send(ioctl::SET_PIT2, &state).granted("set")?;
    let after: kvm_pit_state2 = vm.receive(ioctl::GET_PIT2).granted("get again")?;
    let got = (after.channels[1].count, after.channels[1].mode, after.channels[2].count);
    equal("counts and mode", got, (0x1234, 2, 0x4321))?;
    equal("flags", after.flags & KVM_PIT_FLAGS_HPET_LEGACY, KVM_PIT_FLAGS_HPET_LEGACY)
}

fn a_pit_that_is_not_there_is_enxio() -> Outcome {
    let vm = vm(true)?;
    let state: Result<kvm_pit_state2, _> = vm.receive(ioctl::GET_PIT2);
    state.map(drop).refused("get", libc::ENXIO)?;
    vm.send(ioctl::SET_PIT2, &kvm_pit_state2::default()).refused("set", libc::ENXIO)
}

fn a_message_without_irqchip_is_refused() -> Outcome {
    let msi = kvm_msi { address_lo: 0xfee0_0000, data: 0x40, ..Default::default() };
    vm(false)?.send(ioctl::SIGNAL_MSI, &msi).refused("KVM_SIGNAL_MSI", libc::EINVAL)
}

fn a_message_with_unknown_flags_is_einval() -> Outcome {
    let vm = vm(true)?;
    let _vcpu = vm.create_vcpu(0)?;
    for flags in [1 << 1, 1 << 31] {
        let msi = kvm_msi { address_lo: 0xfee0_0000, data: 0x40, flags, ..Default::default() };
        vm.send(ioctl::SIGNAL_MSI, &msi).refused(&format!("flags {flags:#x}"), libc::EINVAL)?;
    }
    Ok(())
}
