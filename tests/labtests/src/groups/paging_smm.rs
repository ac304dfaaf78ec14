//! The same tables in and out of system-management mode: there the slots of address space 1 count, and nothing of one
//! address space may be seen in the other (KVM API §4.35).

use kvm_bindings::*;

use crate::kvm::file::Commands;
use crate::kvm::ioctl;
use crate::machine::code::guest_code;
use crate::machine::layout::{PORT_DONE, PORT_MARK};
use crate::machine::memory::{Memory, PAGE};
use crate::machine::smram::{HANDLER, SMBASE, SPACE_1, events};
use crate::machine::stage::layout::MEMORY_BYTES;
use crate::machine::stage::operation::*;
use crate::machine::stage::paging::*;
use crate::machine::stage::{CR0, Stage, WP, in_each_mode, mark, tag};
use crate::outcome::{Answer, Outcome, equal, holds};
use crate::runner::tests;

tests!("paging_smm":
    each_address_space_shows_its_own_memory,
    tables_of_one_address_space_are_not_those_of_the_other,
    control_bits_changed_inside_are_as_before_outside,
    a_slot_of_one_address_space_goes_and_the_other_stays,
);

guest_code!(handler, 16, "out %al, $PORT_MARK", "rsm");

/// Where the two address spaces differ.
const ELSEWHERE: u64 = 0x1000_0000;

/// A stage with two address spaces: the same memory, and 16 pages that are not the same.
struct Spaces {
    stage: Stage,
    outside: Memory,
    inside: Memory,
}

/// What a vCPU was when it was interrupted.
struct Interrupted(kvm_regs, kvm_sregs);

impl Spaces {
    fn new(paging: Paging) -> Outcome<Self> {
        let stage = Stage::new(paging)?;
        stage.guest.system.require(KVM_CAP_X86_SMM, "KVM_CAP_X86_SMM")?;
        let (outside, inside) = (Memory::new(16 * PAGE)?, Memory::new(16 * PAGE)?);
        for page in 0..16 {
            mark(&outside, page * PAGE, 0x100 + page);
            mark(&inside, page * PAGE, 0x200 + page);
        }
        let set = |slot, gpa, memory: &Memory| {
            let bytes = memory.bytes();
            stage.guest.vm.set_slot(slot, 0, gpa, bytes, memory.hva()).granted("slot").map(drop)
        };
        set(SPACE_1, 0, stage.memory())?;
        set(1, ELSEWHERE, &outside)?;
        set(SPACE_1 | 1, ELSEWHERE, &inside)?;
        equal("memory", stage.memory().bytes(), MEMORY_BYTES)?;
        stage.memory().write_bytes(SMBASE + HANDLER, handler());
        Ok(Self { stage, outside, inside })
    }

    /// Goes into the mode; what the vCPU was on the way.
    fn enter(&self) -> Outcome<Interrupted> {
        let vcpu = self.stage.vcpu();
        self.stage.load(0, &[]);
        vcpu.call(ioctl::SMI, 0).granted("KVM_SMI")?;
        let exit = vcpu.run().granted("KVM_RUN")?;
        holds("the handler's mark", exit.is_out(PORT_MARK), &exit)?;
        equal("in the mode", events(vcpu)?.smi.smm, 1)?;
        Ok(Interrupted(vcpu.regs()?, vcpu.sregs()?))
    }

    /// Goes on as before it.
    fn leave(&self, interrupted: &Interrupted) -> Outcome {
        let vcpu = self.stage.vcpu();
        vcpu.set_sregs(&interrupted.1)?;
        // Behind the mark, at RSM.
        vcpu.set_regs(&kvm_regs { rip: HANDLER + 2, ..interrupted.0 })?;
        // RSM loads the top of PAE; see `Stage::switch_cr4`.
        let stage = &self.stage;
        let tops = if stage.paging == Paging::Pae { 4 } else { 0 };
        for at in (stage.root..).step_by(8).take(tops) {
            stage.paging.put(stage.memory(), at, stage.entry(at) & !ACCESSED);
        }
        // What was interrupted goes on with an empty list.
        self.stage.load(0, &[]);
        let exit = vcpu.run().granted("KVM_RUN")?;
        equal("in the mode", events(vcpu)?.smi.smm, 0)?;
        holds("the list's end", exit.is_out(PORT_DONE), &exit)?;
        if self.stage.paging.is_wide() {
            return Ok(());
        }
        // RSM has marked the task segment busy, of which the lab's emulated CPU dies in 32-bit modes.
        self.stage.start(0, self.stage.root)
    }
}

fn each_address_space_shows_its_own_memory() -> Outcome {
    in_each_mode(|paging| {
        let mut spaces = Spaces::new(paging)?;
        let (va, span) = (paging.at(), paging.span(2));
        spaces.stage.map(va, 1, (ELSEWHERE + 3 * PAGE) | ALL);
        spaces.stage.map(va + 4 * span, 2, ELSEWHERE | ALL);
        let large = va + 4 * span + 3 * PAGE;
        let look = |base: u64, round: u64| {
            [
                (read(va + 8), value(base + 3)),
                (fetch(large).user(), value(base + 3)),
                (add(large + 16, 1), value(round)),
                (write(va + 24, base).user(), DONE),
                (read(large + 24), value(base)),
            ]
        };
        for round in 0..4 {
            spaces.stage.expect("outside", &look(0x100, round))?;
            let interrupted = spaces.enter()?;
            spaces.stage.start(0, spaces.stage.root)?;
            spaces.stage.expect("inside", &look(0x200, round))?;
            spaces.leave(&interrupted)?;
        }
        let counts =
            [&spaces.outside, &spaces.inside].map(|memory| memory.read(3 * PAGE + 16) & 0xff);
        equal("counts", counts, [4, 4])
    })
}

fn tables_of_one_address_space_are_not_those_of_the_other() -> Outcome {
    in_each_mode(|paging| {
        let mut spaces = Spaces::new(paging)?;
        let va = paging.at();
        // The table itself lies where the two differ: the same frame, other entries.
        let frames = [spaces.stage.frame(), spaces.stage.frame()];
        let offset = paging.offset(va, 1);
        for (memory, frame) in [&spaces.outside, &spaces.inside].into_iter().zip(frames) {
            (0..PAGE).step_by(8).for_each(|at| memory.write(5 * PAGE + at, 0));
            paging.put(memory, 5 * PAGE + offset, frame | ALL);
        }
        let link = spaces.stage.place_of(va, 2);
        paging.put(spaces.stage.memory(), link, (ELSEWHERE + 5 * PAGE) | ALL);
        let number = |frame| value(tag(frame));
        for _ in 0..4 {
            spaces.stage.expect(
                "outside",
                &[(read(va + 8), number(frames[0])), (write(va + 16, 1), DONE)],
            )?;
            let interrupted = spaces.enter()?;
            spaces.stage.start(0, spaces.stage.root)?;
            spaces.stage.expect(
                "inside",
                &[(read(va + 8), number(frames[1])), (write(va + 16, 1).user(), DONE)],
            )?;
            spaces.leave(&interrupted)?;
        }
        for memory in [&spaces.outside, &spaces.inside] {
            equal("bits", paging.get(memory, 5 * PAGE + offset) & 0x60, ACCESSED | DIRTY)?;
        }
        Ok(())
    })
}

fn control_bits_changed_inside_are_as_before_outside() -> Outcome {
    in_each_mode(|paging| {
        let mut spaces = Spaces::new(paging)?;
        let va = paging.at();
        spaces.stage.map(va, 1, ELSEWHERE | PRESENT | USER);
        for _ in 0..4 {
            spaces.stage.expect(
                "outside",
                &[(write(va + 16, 1), fault(P | W, va + 16)), (fetch(va), value(0x100))],
            )?;
            let interrupted = spaces.enter()?;
            spaces.stage.start(0, spaces.stage.root)?;
            spaces.stage.expect(
                "inside",
                &[
                    (write(va + 16, 2), fault(P | W, va + 16)),
                    (cr0(CR0 & !WP), DONE),
                    (write(va + 16, 2), DONE),
                    (read(va + 16).user(), value(2)),
                ],
            )?;
            spaces.leave(&interrupted)?;
        }
        spaces.stage.expect("outside", &[(read(va + 16), value(0))])
    })
}

fn a_slot_of_one_address_space_goes_and_the_other_stays() -> Outcome {
    in_each_mode(|paging| {
        let mut spaces = Spaces::new(paging)?;
        let va = paging.at();
        spaces.stage.map(va, 1, (ELSEWHERE + PAGE) | ALL);
        for round in 0..4 {
            let moved = round % 2 == 1;
            spaces
                .stage
                .expect("outside", &[(read(va + 8), value(if moved { 0x100 } else { 0x101 }))])?;
            let interrupted = spaces.enter()?;
            spaces.stage.start(0, spaces.stage.root)?;
            spaces
                .stage
                .expect("inside", &[(read(va + 8), value(0x201)), (write(va + 16, 1), DONE)])?;
            // The outer slot moves by a page while the vCPU is inside.
            let gpa = ELSEWHERE + if moved { 0 } else { PAGE };
            let (bytes, hva) = (spaces.outside.bytes(), spaces.outside.hva());
            spaces.stage.guest.vm.set_slot(1, 0, gpa, bytes, hva).granted("move")?;
            spaces.stage.expect(
                "inside",
                &[(read(va + 8).user(), value(0x201)), (read(va + 16), value(1))],
            )?;
            spaces.leave(&interrupted)?;
        }
        Ok(())
    })
}
