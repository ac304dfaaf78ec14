//! Virtual interrupts that L1 has delivered to L2, and those that it posts.
//!
//! SDM vol. 3C §30.1 (virtual-APIC state), §30.2 (delivery), §30.5 (the x2APIC's MSRs), §30.6 (posted interrupts).

use kvm_bindings::{kvm_lapic_state, kvm_msi};

use super::nested_vmx::{EXIT_CPUID, EXITED, L2_CODE, fails, launch, must, program, with};
use super::nested_vmx_activity as activity;
use crate::kvm::file::Commands;
use crate::kvm::ioctl;
use crate::machine::code::guest_code;
use crate::machine::guest::Guest;
use crate::machine::layout::{ARGUMENT, EOI_MODE, FREE};
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
    an_ipi_to_itself_below_16_is_l1s,
    the_page_of_an_apic_sends_ends_and_holds_back,
    exits_of_nmis_hold_nothing_back,
    l2_lowers_its_priority,
    a_halted_l2_wakes_for_one,
    an_interrupt_waits_behind_what_l1_injects,
    the_controls_need_each_other,
    a_waiting_interrupt_travels,
    posted_interrupts_reach_l2_without_an_exit,
    an_interrupt_of_l1s_behind_a_notification_ends_the_run,
    a_halted_l2_wakes_for_what_it_takes,
);

const PAGE: u64 = FREE + 0x1_5000;
const DESCRIPTOR: u64 = FREE + 0x1_6040;
/// The page that stands for L2's local APIC.
const ACCESSES: u64 = FREE + 0x1_7000;
/// A page of zeroes: no MSR exits to L1.
const NO_MSR: u64 = FREE + 0x2000;
/// L2's own table of gates, each of which leads to `HANDLER`.
const GATES: u64 = FREE + 0x1_3000;
const HANDLER: u64 = FREE + 0x1_4000;

const EXIT_INTERRUPT: u64 = 1;
const EXIT_EOI: u64 = 45;
const EXIT_WRITE: u64 = 56;

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
    // With its APIC's page: priority 0x70, an IPI to itself with the vector in R9, which waits, until the priority falls;
    // the upper half of the ICR in between, behind which nothing is forgotten.
    by_page,
    64,
    "mov $FREE + 0x17000, %edi",
    "movl $0x70, 0x80(%rdi)",
    "sti",
    "lea 0x40000(%r9), %eax",
    "mov %eax, 0x300(%rdi)",
    "nop",
    "mov ARGUMENT, %rbx",
    "cli",
    "movl $0x20, 0x80(%rdi)",
    "movl $0x1000000, 0x310(%rdi)",
    "sti",
    "nop",
    "mov ARGUMENT, %rdx",
    "movl $0, 0xb0(%rdi)",
    "cpuid",
    "hlt",
);

guest_code!(
    // The handler for that: counts.
    counts,
    64,
    "incq ARGUMENT",
    "iretq",
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
    // Halts with its interrupts on, with a priority that holds back what is below 0x50.
    halts,
    64,
    "mov $4, %eax",
    "mov %rax, %cr8",
    "sti",
    "hlt",
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
        Self::of(guest)
    }

    /// The L1 that has come to its mark, as a KVM is that hears of NMIs.
    fn of(guest: Guest) -> Outcome<Self> {
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
            (0x4000, must(&guest, 0x481)? | 1 | NMI_EXITING),
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
        self.set(STATUS, requested | in_service << 8);
    }

    /// L1 posts interrupts for L2.
    fn posts(&mut self) -> Outcome {
        if self.guest.vcpu().msr(0x481)?.unwrap_or(0) >> 39 & 1 == 0 {
            return skip("no posted interrupts in VMX_PINBASED_CTLS");
        }
        self.set(0x4000, must(&self.guest, 0x481)? | 1 | NMI_EXITING | 1 << 7);
        self.set(0x400c, must(&self.guest, 0x483)? | 1 << 9 | 1 << 15);
        self.set(0x2016, DESCRIPTOR);
        self.set(0x2, NOTIFICATION);
        self.registers(0, 0)
    }

    /// What the descriptor names, outstanding.
    fn post(&self, vector: u64) {
        self.guest.memory.write(DESCRIPTOR + vector / 64 * 8, 1 << (vector % 64));
        self.guest.memory.write(DESCRIPTOR + 32, 1 | NOTIFICATION << 16);
    }

    fn registers(&self, r8: u64, r9: u64) -> Outcome {
        let mut regs = self.guest.vcpu().regs()?;
        (regs.r8, regs.r9) = (r8, r9);
        self.guest.vcpu().set_regs(&regs)?;
        self.guest.memory.write(COUNT, 0);
        Ok(())
    }

    fn set(&mut self, field: u64, value: u64) {
        self.fields.retain(|(encoding, _)| *encoding != field);
        self.fields.push((field, value));
    }

    /// The exit that L1 sees of an L2 with these registers, and how many interrupts L2 has taken.
    fn exit(&self, r8: u64, r9: u64) -> Outcome<(u64, u64)> {
        self.registers(r8, r9)?;
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

const NMI_EXITING: u64 = 1 << 3;
const NOTIFICATION: u64 = 0xf2;
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

fn an_ipi_to_itself_below_16_is_l1s() -> Outcome {
    if is_stock() {
        return skip("stock KVM on the emulated CPU makes no exit of such a WRMSR");
    }
    let l1 = L1::new(sends())?;
    equal("an exit", l1.exit(0, 0xf)?, (EXIT_WRITE, 0))?;
    equal("the register", l1.guest.result(QUALIFICATION), 0x3f0)?;
    equal("behind the instruction", l1.guest.result(GUEST_RIP), L2_CODE + SENT)?;
    equal("the page", l1.guest.memory.read(PAGE + 0x3f0), 0xf)
}
/// Where that program goes on behind its WRMSR.
const SENT: u64 = 1 + 5 + 3 + 2 + 2;

fn the_page_of_an_apic_sends_ends_and_holds_back() -> Outcome {
    let mut l1 = L1::new(by_page())?;
    if l1.guest.vcpu().msr(0x48b)?.unwrap_or(0) >> 32 & 1 == 0 {
        return skip("no APIC-access page in VMX_PROCBASED_CTLS2");
    }
    l1.set(0x401e, 1 | 1 << 8 | 1 << 9);
    l1.set(0x2014, ACCESSES);
    l1.guest.memory.write_bytes(HANDLER, counts());
    l1.guest.memory.write(ARGUMENT, 0);
    // The emulated CPU makes no exit of an end.
    if !is_stock() {
        l1.set(0x201e, 1 << (0x51 - 64));
    }
    let reason = l1.exit(0, 0x51)?.0;
    equal("the end is an exit", reason, if is_stock() { EXIT_CPUID } else { EXIT_EOI })?;
    equal("the vector", l1.guest.result(QUALIFICATION), if is_stock() { 0 } else { 0x51 })?;
    let regs = l1.guest.vcpu().regs()?;
    equal("held back", regs.rbx, 0)?;
    equal("let through", l1.guest.memory.read(ARGUMENT), 1)?;
    equal("in service", l1.word(0x100, 0x51), 0)?;
    equal("the upper half", l1.guest.memory.read(PAGE + 0x310) as u32, 0x100_0000)
}

fn exits_of_nmis_hold_nothing_back() -> Outcome {
    for exiting in [0, NMI_EXITING] {
        let mut l1 = L1::new(sends())?;
        l1.set(0x4000, must(&l1.guest, 0x481)? | 1 | exiting);
        equal("an IPI", l1.exit(0, 0x51)?, (EXIT_CPUID, 1))?;
        l1.request(0x61);
        l1.status(0x61, 0);
        // As the entry does that lets it through: L2 has its interrupts on.
        l1.set(0x6820, 0x202);
        equal("at the entry", l1.exit(0, 0x51)?, (EXIT_CPUID, 1))?;
        equal("in service", l1.word(0x100, 0x61), 2)?;
    }
    Ok(())
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
    l1.posts()?;
    // A mark of L2's.
    launch(&l1.guest, &l1.fields)?;
    l1.post(0x41);
    enable_apic(&l1.guest)?;
    interrupts_l1(&l1.guest, NOTIFICATION)?;
    l1.guest.reach_mark()?;
    equal("an exit", l1.left()?, (EXIT_CPUID, 1))?;
    equal("in service", l1.word(0x100, 0x41), 2)?;
    equal("the descriptor", l1.guest.memory.read(DESCRIPTOR + 32), 0xf2 << 16)?;
    equal("taken", l1.guest.memory.read(DESCRIPTOR + 8), 0)
}

/// An interrupt for L1's local APIC.
fn interrupts_l1(guest: &Guest, vector: u64) -> Outcome {
    let msi = kvm_msi { address_lo: 0xfee0_0000, data: vector as u32, ..Default::default() };
    equal("deliveries", guest.vm.send(ioctl::SIGNAL_MSI, &msi), Ok(1))
}

fn an_interrupt_of_l1s_behind_a_notification_ends_the_run() -> Outcome {
    let mut l1 = L1::new(waits())?;
    l1.posts()?;
    launch(&l1.guest, &l1.fields)?;
    l1.post(0x41);
    enable_apic(&l1.guest)?;
    interrupts_l1(&l1.guest, 0x51)?;
    interrupts_l1(&l1.guest, NOTIFICATION)?;
    l1.guest.reach_mark()?;
    equal("L1's own", l1.left()?, (EXIT_INTERRUPT, 0))?;
    equal("the descriptor", l1.guest.memory.read(DESCRIPTOR + 8), 0)?;
    equal("requested", l1.word(0x200, 0x41), 2)
}

/// L1's second vCPU posts what L2 has not the priority for, and then what it takes.
fn a_halted_l2_wakes_for_what_it_takes() -> Outcome {
    for (posted, reason, taken) in [(0x41, EXIT_INTERRUPT, 0), (0x51, EXIT_CPUID, 1)] {
        let guest = activity::ready(activity::program())?;
        guest.memory.write_bytes(L2_CODE, halts());
        let mut l1 = L1::of(guest)?;
        l1.posts()?;
        l1.post(posted);
        let others = if taken == 0 { &[NOTIFICATION, 0x61][..] } else { &[NOTIFICATION] };
        let words: Vec<u64> = others.iter().map(|vector| 0x4000 | vector).collect();
        activity::sent(&l1.guest, &l1.fields, &words)?;
        equal("the end", l1.left()?, (reason, taken))?;
        equal("requested", l1.word(0x200, 0x41), if taken == 0 { 2 } else { 0 })?;
    }
    Ok(())
}
