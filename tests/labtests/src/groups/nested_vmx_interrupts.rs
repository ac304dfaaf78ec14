//! Virtual interrupts that L1 has delivered to L2, and those that it posts.
//!
//! SDM vol. 3C §30.1 (virtual-APIC state), §30.2 (delivery), §30.5 (the x2APIC's MSRs), §30.6 (posted interrupts).

use kvm_bindings::{kvm_lapic_state, kvm_msi};

use super::nested_vmx::{EXIT_CPUID, EXITED, fails, launch, must, program, with};
use crate::kvm::file::Commands;
use crate::kvm::ioctl;
use crate::machine::code::guest_code;
use crate::machine::guest::Guest;
use crate::machine::layout::{EOI_MODE, FREE};
use crate::machine::saved::Saved;
use crate::oracle::is_stock;
use crate::outcome::{Answer, Outcome, equal, skip};
use crate::runner::tests;

tests!("nested_vmx_interrupts":
    an_interrupt_is_delivered_when_l2_takes_it,
    the_highest_comes_first_and_the_priority_holds_back,
    an_end_of_interrupt_lets_the_next_one_through,
    an_end_that_l1_asks_for_is_an_exit,
    l2_sends_itself_an_interrupt,
    l2_lowers_its_priority,
    a_halted_l2_wakes_for_one,
    an_interrupt_waits_behind_what_l1_injects,
    the_controls_need_each_other,
    a_waiting_interrupt_travels,
    posted_interrupts_reach_l2_without_an_exit,
);

const PAGE: u64 = FREE + 0x1_1000;
const DESCRIPTOR: u64 = FREE + 0x1_2040;
/// A page of zeroes: no MSR exits to L1.
const NO_MSR: u64 = FREE + 0x2000;
/// L2's own table of gates, each of which leads to `HANDLER`.
const GATES: u64 = FREE + 0x1_3000;
const HANDLER: u64 = FREE + 0x1_4000;

const EXIT_EOI: u64 = 45;

const QUALIFICATION: u64 = 2;
const GUEST_RIP: u64 = 3;
const STATUS: u64 = 0x810;

guest_code!(
    // Opens for interrupts, and tells by CPUID that none came.
    opens,
    64,
    "xor %ebx, %ebx",
    "sti",
    "nop",
    "nop",
    "cpuid",
    "hlt",
);

guest_code!(
    // Halts where interrupts come at once, then CPUID.
    opens_and_halts,
    64,
    "sti",
    "hlt",
    "cpuid",
);

guest_code!(
    // Sends itself the vector in R9, by the MSR for that.
    sends,
    64,
    "sti",
    "mov $0x83f, %ecx",
    "mov %r9d, %eax",
    "xor %edx, %edx",
    "wrmsr",
    "nop",
    "cpuid",
);

guest_code!(
    // Sets its priority to R9.
    lowers,
    64,
    "sti",
    "mov %r9, %cr8",
    "nop",
    "cpuid",
);

guest_code!(
    // The handler of all vectors: counts, ends the interrupt if R8 is not zero, and if it was the last one, CPUID.
    handles,
    64,
    "incq RESULT + 64",
    "test %r8, %r8",
    "jz 1f",
    "dec %r8",
    "mov $0x80b, %ecx",
    "xor %eax, %eax",
    "xor %edx, %edx",
    "wrmsr",
    "iretq",
    "1: cpuid",
);

guest_code!(
    // Marks, then opens.
    opens_slowly,
    64,
    "out %al, $PORT_MARK",
    "sti",
    "nop",
    "nop",
    "cpuid",
);

guest_code!(
    // Marks, and waits for an interrupt.
    waits,
    64,
    "out %al, $PORT_MARK",
    "sti",
    "0: pause",
    "jmp 0b",
);

struct L1 {
    guest: Guest,
    fields: Vec<(u64, u64)>,
}

impl L1 {
    fn new(l2: &[u8]) -> Outcome<Self> {
        let guest = with(program(), l2)?;
        guest.reach_mark()?;
        if guest.vcpu().msr(0x48b)?.unwrap_or(0) >> 41 & 1 == 0 {
            return skip("no virtual-interrupt delivery in VMX_PROCBASED_CTLS2");
        }
        let selector = u64::from(guest.vcpu().sregs()?.cs.selector);
        for gate in 0..256 {
            let low = HANDLER & 0xffff | selector << 16 | 0x8e00 << 32 | HANDLER >> 16 << 48;
            guest.memory.write(GATES + 16 * gate, low);
        }
        guest.memory.write_bytes(HANDLER, handles());
        guest.memory.write(EOI_MODE, 0);
        let primary = must(&guest, 0x482)? & !(3 << 19) | 1 << 21 | 1 << 28 | 1 << 31;
        let fields = vec![
            (0x4000, must(&guest, 0x481)? | 1),
            (0x4002, primary),
            (0x401e, 1 << 4 | 1 << 8 | 1 << 9),
            (0x2012, PAGE),
            (0x2004, NO_MSR),
            (STATUS, 0),
            (0x6818, GATES),
            (0x4812, 0xfff),
        ];
        Ok(Self { guest, fields })
    }

    /// Requests a vector, in the page alone.
    fn request(&self, vector: u64) {
        let at = PAGE + 0x200 + vector / 32 * 16;
        self.guest.memory.write(at, self.guest.memory.read(at) | 1 << (vector % 32));
    }

    fn status(&mut self, requested: u64, in_service: u64) {
        self.fields[5].1 = requested | in_service << 8;
    }

    fn set(&mut self, field: u64, value: u64) {
        self.fields.retain(|(encoding, _)| *encoding != field);
        self.fields.push((field, value));
    }

    /// The exit that L1 sees of an L2 with these registers, and how many interrupts L2 has taken.
    fn exit(&self, r8: u64, r9: u64) -> Outcome<(u64, u64)> {
        let mut regs = self.guest.vcpu().regs()?;
        (regs.r8, regs.r9) = (r8, r9);
        self.guest.vcpu().set_regs(&regs)?;
        self.guest.memory.write(COUNT, 0);
        launch(&self.guest, &self.fields)?;
        self.left()
    }

    fn left(&self) -> Outcome<(u64, u64)> {
        equal("an exit", self.guest.result(0), EXITED)?;
        Ok((self.guest.result(1), self.guest.memory.read(COUNT)))
    }

    fn word(&self, base: u64, vector: u64) -> u64 {
        self.guest.memory.read(PAGE + base + vector / 32 * 16) as u32 as u64
    }

    fn clear(&self) {
        for word in 0..0x80 {
            self.guest.memory.write(PAGE + 8 * word, 0);
        }
    }
}

const COUNT: u64 = crate::machine::layout::RESULT + 64;

/// Has L1's local APIC take interrupts.
fn enable_apic(guest: &Guest) -> Outcome {
    let mut state: kvm_lapic_state =
        guest.vcpu().receive(ioctl::GET_LAPIC).granted("KVM_GET_LAPIC")?;
    state.regs[0xf1] = 1;
    guest.vcpu().send(ioctl::SET_LAPIC, &state).granted("KVM_SET_LAPIC")?;
    Ok(())
}

fn an_interrupt_is_delivered_when_l2_takes_it() -> Outcome {
    let mut l1 = L1::new(opens())?;
    equal("nothing waits", l1.exit(0, 0)?, (EXIT_CPUID, 0))?;
    l1.request(0x41);
    l1.status(0x41, 0);
    equal("one waits", l1.exit(0, 0)?, (EXIT_CPUID, 1))?;
    equal("in service", l1.word(0x100, 0x41), 2)?;
    equal("not requested", l1.word(0x200, 0x41), 0)?;
    equal("the processor's priority", l1.guest.memory.read(PAGE + 0xa0) as u32, 0x40)?;
    Ok(())
}

fn the_highest_comes_first_and_the_priority_holds_back() -> Outcome {
    let mut l1 = L1::new(opens())?;
    for (priority, in_service, taken) in
        [(0, 0, 1), (0x40, 0, 0), (0x3f, 0, 1), (0, 0x45, 0), (0, 0x35, 1)]
    {
        l1.clear();
        l1.guest.memory.write(PAGE + 0x80, priority);
        l1.request(0x41);
        l1.request(0x33);
        l1.status(0x41, in_service);
        equal("interrupts", l1.exit(0, 0)?, (EXIT_CPUID, taken))?;
        equal("requested", l1.word(0x200, 0x41), if taken == 0 { 2 } else { 0 })?;
        equal("the lower one waits", l1.word(0x200, 0x33), 1 << 0x13)?;
    }
    Ok(())
}

fn an_end_of_interrupt_lets_the_next_one_through() -> Outcome {
    let mut l1 = L1::new(opens())?;
    for vector in [0x41, 0x42, 0x85, 0xf0] {
        l1.request(vector);
    }
    l1.status(0xf0, 0);
    // The last one is not ended.
    equal("interrupts", l1.exit(3, 0)?, (EXIT_CPUID, 4))?;
    equal("in service", (l1.word(0x100, 0x41), l1.word(0x100, 0xf0)), (2, 0))?;
    l1.clear();
    l1.request(0x41);
    l1.status(0x41, 0);
    equal("all are ended", l1.exit(7, 0)?, (EXIT_CPUID, 1))?;
    equal("in service", l1.word(0x100, 0x41), 0)
}

fn an_end_that_l1_asks_for_is_an_exit() -> Outcome {
    if is_stock() {
        return skip("stock KVM on the emulated CPU makes no exit of such a WRMSR");
    }
    // One in each of the four words.
    for (n, vector) in [(0, 0x31), (1, 0x41), (2, 0x85), (3, 0xd1)] {
        let mut l1 = L1::new(opens())?;
        l1.request(vector);
        l1.request(0xe5);
        l1.status(0xe5, 0);
        l1.set(0x201c + 2 * n, 1 << (vector % 64));
        equal(&format!("the end of {vector:x}"), l1.exit(7, 0)?, (EXIT_EOI, 2))?;
        equal("the vector", l1.guest.result(QUALIFICATION), vector)?;
        // WRMSR is not the first instruction of the handler.
        equal("behind the instruction", l1.guest.result(GUEST_RIP), HANDLER + END)?;
        equal("in service", l1.word(0x100, vector), 0)?;
    }
    Ok(())
}
/// Where the handler goes on behind its WRMSR.
const END: u64 = 8 + 3 + 2 + 3 + 5 + 2 + 2 + 2;

fn l2_sends_itself_an_interrupt() -> Outcome {
    let l1 = L1::new(sends())?;
    equal("itself", l1.exit(0, 0x51)?, (EXIT_CPUID, 1))?;
    equal("in service", l1.word(0x100, 0x51), 1 << 0x11)
}

fn l2_lowers_its_priority() -> Outcome {
    let mut l1 = L1::new(lowers())?;
    for (priority, taken) in [(7, 0), (5, 0), (4, 1), (0, 1)] {
        l1.clear();
        l1.guest.memory.write(PAGE + 0x80, 0x70);
        l1.request(0x51);
        l1.status(0x51, 0);
        equal("interrupts", l1.exit(0, priority)?, (EXIT_CPUID, taken))?;
        equal("the priority", l1.guest.memory.read(PAGE + 0x80) as u32, (priority as u32) << 4)?;
    }
    Ok(())
}

fn a_halted_l2_wakes_for_one() -> Outcome {
    let mut l1 = L1::new(opens_and_halts())?;
    l1.request(0x41);
    l1.status(0x41, 0);
    // Behind STI it comes only once L2 halts.
    equal("one that halts", l1.exit(1, 0)?, (EXIT_CPUID, 1))?;
    // Entered halted.
    let mut l1 = L1::new(opens())?;
    if l1.guest.vcpu().msr(0x485)?.unwrap_or(0) >> 6 & 1 == 0 {
        return skip("no activity state HLT");
    }
    l1.request(0x41);
    l1.status(0x41, 0);
    l1.set(0x4826, 1);
    l1.set(0x6820, 0x202);
    equal("a halted one", l1.exit(0, 0)?, (EXIT_CPUID, 1))
}

fn an_interrupt_waits_behind_what_l1_injects() -> Outcome {
    let mut l1 = L1::new(opens())?;
    l1.request(0x41);
    l1.status(0x41, 0);
    l1.set(0x4016, 0x8000_0030);
    l1.set(0x6820, 0x202);
    // Its handler ends vector 0, which is none in service, and then the other comes.
    equal("both", l1.exit(1, 0)?.1, 2)?;
    equal("in service", l1.word(0x100, 0x41), 2)
}

fn the_controls_need_each_other() -> Outcome {
    let l1 = L1::new(opens())?;
    let [pin, primary, secondary, page, map, ..] = l1.fields[..] else { return Ok(()) };
    let no_exits = (pin.0, pin.1 & !1);
    fails(&l1.guest, "without exits of interrupts", &[no_exits, primary, secondary, page, map], 7)?;
    let no_shadow = (primary.0, primary.1 & !(1 << 21) | 3 << 19);
    fails(&l1.guest, "without a TPR shadow", &[pin, no_shadow, (0x401e, 1 << 9), page, map], 7)?;
    if l1.guest.vcpu().msr(0x481)?.unwrap_or(0) >> 39 & 1 == 0 {
        return Ok(());
    }
    let posts = (pin.0, pin.1 | 1 << 7);
    let acknowledges = (0x400c, must(&l1.guest, 0x483)? | 1 << 9 | 1 << 15);
    let cases = [
        ("without acknowledgement", must(&l1.guest, 0x483)? | 1 << 9, DESCRIPTOR, 0xf2),
        ("an unaligned descriptor", acknowledges.1, DESCRIPTOR + 8, 0xf2),
        ("a descriptor beyond physical addresses", acknowledges.1, 1 << 60, 0xf2),
        ("a vector of more than 8 bits", acknowledges.1, DESCRIPTOR, 0x1f2),
    ];
    for (what, exit, descriptor, vector) in cases {
        let fields = [
            posts,
            primary,
            secondary,
            page,
            map,
            (0x400c, exit),
            (0x2016, descriptor),
            (0x2, vector),
        ];
        fails(&l1.guest, what, &fields, 7)?;
    }
    Ok(())
}

fn a_waiting_interrupt_travels() -> Outcome {
    let mut l1 = L1::new(opens_slowly())?;
    l1.request(0x41);
    l1.status(0x41, 0);
    l1.guest.memory.write(COUNT, 0);
    let mut regs = l1.guest.vcpu().regs()?;
    regs.r8 = 0;
    l1.guest.vcpu().set_regs(&regs)?;
    launch(&l1.guest, &l1.fields)?;
    let saved = Saved::of(&l1.guest)?;
    for memory_last in [false, true] {
        let other = saved.restored(memory_last)?;
        other.reach_mark()?;
        equal("exit", (other.result(0), other.result(1)), (EXITED, EXIT_CPUID))?;
        equal("taken", other.memory.read(COUNT), 1)?;
    }
    Ok(())
}

fn posted_interrupts_reach_l2_without_an_exit() -> Outcome {
    let mut l1 = L1::new(waits())?;
    if l1.guest.vcpu().msr(0x481)?.unwrap_or(0) >> 39 & 1 == 0 || is_stock() {
        return skip("no posted interrupts");
    }
    l1.set(0x4000, must(&l1.guest, 0x481)? | 1 | 1 << 7);
    l1.set(0x400c, must(&l1.guest, 0x483)? | 1 << 9 | 1 << 15);
    l1.set(0x2016, DESCRIPTOR);
    l1.set(0x2, 0xf2);
    let mut regs = l1.guest.vcpu().regs()?;
    regs.r8 = 0;
    l1.guest.vcpu().set_regs(&regs)?;
    l1.guest.memory.write(COUNT, 0);
    // A mark of L2's.
    launch(&l1.guest, &l1.fields)?;
    l1.guest.memory.write(DESCRIPTOR + 8, 2);
    l1.guest.memory.write(DESCRIPTOR + 32, 1 | 0xf2 << 16);
    enable_apic(&l1.guest)?;
    let msi = kvm_msi { address_lo: 0xfee0_0000, data: 0xf2, ..Default::default() };
    equal("deliveries", l1.guest.vm.send(ioctl::SIGNAL_MSI, &msi), Ok(1))?;
    l1.guest.reach_mark()?;
    equal("an exit", l1.left()?, (EXIT_CPUID, 1))?;
    equal("in service", l1.word(0x100, 0x41), 2)?;
    equal("the descriptor", l1.guest.memory.read(DESCRIPTOR + 32), 0xf2 << 16)?;
    equal("taken", l1.guest.memory.read(DESCRIPTOR + 8), 0)
}
