//! A stage for tests of what a guest may expect of its paging: a guest in any paging mode that does what a list of
//! operations says and writes down what came of each. The VMM looks on, and can change everything in between.

pub mod layout;
pub mod model;
pub mod operation;
pub mod paging;
mod server;

use guest_machine::descriptors::{
    CODE_SELECTOR as KERNEL_CODE, DATA_SELECTOR as KERNEL_DATA, TASK_SELECTOR as TASK, USER,
    interrupt_gate,
};
use kvm_bindings::{
    KVM_MP_STATE_RUNNABLE, kvm_dtable, kvm_mp_state, kvm_regs, kvm_segment, kvm_sregs,
};

use self::layout::*;
use self::operation::{END, Operation, Seen};
use self::paging::{ACCESSED, ALL, DIRTY, LARGE, PRESENT, Paging, Pool, Tree, WRITABLE};
use super::guest::{Chip, Guest, Mode};
use super::layout::{GDT, IDT, PORT_DONE, PORT_MARK, PROGRAM};
use super::memory::{Memory, PAGE};
use crate::kvm::exit::Exit;
use crate::kvm::file::{Commands, System};
use crate::kvm::ioctl;
use crate::kvm::vcpu::Vcpu;
use crate::oracle::{self, Vendor};
use crate::outcome::{Answer, Outcome, Trouble, equal, fail};

const USER_DATA: u16 = 0x3b;

/// CR0 at the start: PE, MP, ET, NE, WP, PG.
pub const CR0: u64 = 0x8001_0033;
/// CR0.WP.
pub const WP: u64 = 1 << 16;
/// CR0.PG.
pub const PG: u64 = 1 << 31;
/// CR4.PSE.
pub const PSE: u64 = 1 << 4;
/// CR4.PAE.
pub const PAE: u64 = 1 << 5;
/// CR4.PGE.
pub const PGE: u64 = 1 << 7;
/// CR4.LA57.
pub const LA57: u64 = 1 << 12;
/// CR4.SMEP.
pub const SMEP: u64 = 1 << 20;
/// CR4.SMAP.
pub const SMAP: u64 = 1 << 21;
/// EFER: SCE, LME, LMA.
const EFER_LONG: u64 = 0x501;
/// EFER.NXE.
pub const NXE: u64 = 1 << 11;

/// A guest that does what it is told.
pub struct Stage {
    pub guest: Guest,
    pub paging: Paging,
    /// Where page tables are taken from.
    pub tables: Pool,
    /// Where data frames are taken from.
    pub frames: Pool,
    /// The root of the tables that the guest starts with.
    pub root: u64,
}

/// Runs `test` in each paging mode that the host offers its guests; a failure names the mode.
pub fn in_each_mode(test: impl Fn(Paging) -> Outcome) -> Outcome {
    let mut cpuid = System::open()?.supported_cpuid()?;
    in_modes(&Paging::offered(&mut cpuid), test)
}

/// Does this in each 64-bit mode.
pub fn in_each_wide_mode(test: impl Fn(Paging) -> Outcome) -> Outcome {
    in_each_mode(|paging| if paging.is_wide() { test(paging) } else { Ok(()) })
}

fn in_modes(modes: &[Paging], test: impl Fn(Paging) -> Outcome) -> Outcome {
    for paging in modes {
        test(*paging).map_err(|trouble| match trouble {
            Trouble::Failed(reason) => Trouble::Failed(format!("{paging:?}: {reason}")),
            Trouble::Skipped(reason) => Trouble::Skipped(format!("{paging:?}: {reason}")),
        })?;
    }
    Ok(())
}

impl Stage {
    /// One vCPU in this mode, over a one-to-one map of all its memory.
    pub fn new(paging: Paging) -> Outcome<Self> {
        Self::with_vcpus(paging, 1)
    }

    /// A stage with up to two vCPUs, with local APICs if two.
    pub fn with_vcpus(paging: Paging, vcpus: u32) -> Outcome<Self> {
        Self::over(Memory::new(MEMORY_BYTES)?, paging, vcpus)
    }

    /// A stage over a given memory of [`MEMORY_BYTES`].
    pub fn over(memory: Memory, paging: Paging, vcpus: u32) -> Outcome<Self> {
        let chip = if vcpus > 1 { Chip::Kernel } else { Chip::None };
        let code = server::kernel(paging.is_wide());
        let guest = Guest::over(memory, chip, Mode::Real, vcpus, code)?;
        let mut stage = Self {
            guest,
            paging,
            tables: Pool::new(TABLES, FRAMES),
            frames: Pool::new(FRAMES, MEMORY_BYTES),
            root: 0,
        };
        stage.furnish();
        stage.root = stage.new_root();
        for index in 0..vcpus as usize {
            stage.start(index, stage.root)?;
        }
        Ok(stage)
    }

    pub fn memory(&self) -> &Memory {
        &self.guest.memory
    }

    pub fn vcpu(&self) -> &Vcpu {
        self.guest.vcpu()
    }

    /// Descriptors, handlers and user mode's code.
    fn furnish(&self) {
        let memory = self.memory();
        let wide = self.paging.is_wide();
        let (code, data) = match wide {
            true => (0x00af_9b00_0000_ffff_u64, 0x00cf_9300_0000_ffff),
            false => (0x00cf_9b00_0000_ffff, 0x00cf_9300_0000_ffff),
        };
        let entries = [0, 0, code, data, 0, 0, code | USER, data | USER];
        for (at, entry) in (GDT..).step_by(8).zip(entries) {
            memory.write(at, entry);
        }
        for vector in 0..=255_u8 {
            let Some(handler) = server::entry(vector) else { continue };
            let [low, high] = interrupt_gate(handler);
            let low = if vector == server::BACK { low | USER } else { low };
            if wide {
                memory.write(IDT + u64::from(vector) * 16, low);
                memory.write(IDT + u64::from(vector) * 16 + 8, high);
            } else {
                memory.write(IDT + u64::from(vector) * 8, low);
            }
        }
        memory.write_bytes(USER_TEXT, server::user(wide));
        for vcpu in 0..2 {
            let (tss, stack) = (TSS + vcpu as u64 * TSS_BYTES, stack_top(vcpu));
            memory.write_bytes(tss + 4, &stack.to_le_bytes());
            if !wide {
                memory.write_bytes(tss + 8, &KERNEL_DATA.to_le_bytes());
            }
            memory.write(stack, list(vcpu));
        }
    }

    /// A new root over a one-to-one map of the guest's memory for the kernel, whose bits are all set but for
    /// user mode's pages; written by the VMM.
    pub fn new_root(&mut self) -> u64 {
        let root = self.tables.page();
        let tree = Tree { paging: self.paging, root, memory: &self.guest.memory };
        let large = self.paging.span(2);
        let kernel = PRESENT | WRITABLE | ACCESSED | DIRTY;
        for page in (0..large).step_by(PAGE as usize) {
            let user = page & !(2 * PAGE - 1) == USER_TEXT;
            let flags = if user { ALL | ACCESSED | DIRTY } else { kernel };
            let entry = tree.make(&mut self.tables, page, 1);
            self.paging.put(&self.guest.memory, entry, page | flags);
        }
        if self.paging == Paging::Pae {
            // All four entries of the top are there, because they are loaded with CR3 only.
            for gib in 1..4 {
                tree.make(&mut self.tables, gib << 30, 2);
            }
        }
        for page in (large..MEMORY_BYTES).step_by(large as usize) {
            let entry = tree.make(&mut self.tables, page, 2);
            self.paging.put(&self.guest.memory, entry, page | kernel | LARGE);
        }
        root
    }

    /// A new root with the one-to-one map of the guest's own root, and no more.
    pub fn light_root(&mut self) -> u64 {
        let root = self.tables.page();
        let shared = match self.paging {
            Paging::Legacy => MEMORY_BYTES / self.paging.span(2),
            _ => 1,
        };
        for at in
            (0..shared * self.paging.entry_bytes()).step_by(self.paging.entry_bytes() as usize)
        {
            self.paging.put(&self.guest.memory, root + at, self.entry(self.root + at));
        }
        if self.paging == Paging::Pae {
            for gib in 1..4 {
                self.place_in(root, gib << 30, 2);
            }
        }
        root
    }

    /// CR4 at the start.
    pub fn cr4(&self) -> u64 {
        match self.paging {
            Paging::Legacy => PSE,
            Paging::Pae | Paging::Four => PAE,
            Paging::Five => PAE | LA57,
        }
    }

    /// EFER at the start.
    pub fn efer(&self) -> u64 {
        match self.paging {
            Paging::Legacy => 0,
            Paging::Pae => NXE,
            Paging::Four | Paging::Five => EFER_LONG | NXE,
        }
    }

    /// Special registers of the start.
    pub fn sregs(&self, index: usize, root: u64) -> Outcome<kvm_sregs> {
        let wide = self.paging.is_wide();
        let flat = kvm_segment { limit: 0xffff_ffff, present: 1, s: 1, g: 1, ..Default::default() };
        let data = kvm_segment { selector: USER_DATA, type_: 3, db: 1, dpl: 3, ..flat };
        Ok(kvm_sregs {
            cs: kvm_segment {
                selector: KERNEL_CODE,
                type_: 11,
                l: wide.into(),
                db: (!wide).into(),
                ..flat
            },
            ss: kvm_segment { selector: KERNEL_DATA, dpl: 0, ..data },
            ds: data,
            es: data,
            fs: data,
            gs: data,
            tr: kvm_segment {
                selector: TASK,
                // The emulated CPU dies of a 32-bit task segment that is marked busy.
                type_: if wide || oracle::vendor() == Vendor::Intel { 11 } else { 9 },
                s: 0,
                g: 0,
                base: TSS + index as u64 * TSS_BYTES,
                limit: 0x67,
                ..flat
            },
            gdt: kvm_dtable { base: GDT, limit: 8 * 8 - 1, padding: [0; 3] },
            idt: kvm_dtable { base: IDT, limit: 256 * 16 - 1, padding: [0; 3] },
            cr0: CR0,
            cr3: root,
            cr4: self.cr4(),
            efer: self.efer(),
            ..self.guest.vcpus[index].sregs()?
        })
    }

    /// Turns the guest into one of another paging mode: its program, descriptors and registers, but not its tables.
    pub fn become_a(&mut self, paging: Paging, root: u64) -> Outcome {
        self.paging = paging;
        self.memory().write_bytes(PROGRAM, server::kernel(paging.is_wide()));
        self.furnish();
        self.start(0, root)
    }

    /// Puts a vCPU at the start of its list.
    pub fn start(&self, index: usize, root: u64) -> Outcome {
        let vcpu = &self.guest.vcpus[index];
        vcpu.set_sregs(&self.sregs(index, root)?)?;
        let stack = stack_top(index);
        let regs = kvm_regs {
            rip: server::START,
            rsp: stack,
            rbp: stack,
            rflags: 2,
            ..Default::default()
        };
        vcpu.set_regs(&regs)?;
        if self.guest.vcpus.len() > 1 {
            // Through the x2APIC, as nothing maps the other one.
            let base = vcpu.msr(0x1b)?.unwrap_or_default();
            vcpu.set_msr(0x1b, base | 0xc00)?;
            vcpu.set_msr(0x80f, 0x1ff)?;
            let runnable = kvm_mp_state { mp_state: KVM_MP_STATE_RUNNABLE };
            vcpu.send(ioctl::SET_MP_STATE, &runnable).granted("KVM_SET_MP_STATE")?;
        }
        Ok(())
    }

    /// A data frame: at its start code that returns a number of its own, which is at +8, too.
    pub fn frame(&mut self) -> u64 {
        let frame = self.frames.page();
        self.mark_frame(frame);
        frame
    }

    /// A run of frames that a large page can map, each marked like [`Self::frame`].
    pub fn large_frame(&mut self) -> u64 {
        let bytes = self.paging.span(2);
        let frame = self.frames.aligned(bytes);
        for page in (frame..frame + bytes).step_by(PAGE as usize) {
            self.mark_frame(page);
        }
        frame
    }

    /// Writes a frame's number and code.
    pub fn mark_frame(&self, frame: u64) {
        mark(self.memory(), frame, tag(frame));
    }

    /// The tables that the guest starts with.
    pub fn tree(&self) -> Tree<'_> {
        self.tree_at(self.root)
    }

    /// The tables under another root.
    pub fn tree_at(&self, root: u64) -> Tree<'_> {
        Tree { paging: self.paging, root, memory: &self.guest.memory }
    }

    /// Maps a page of this level by an entry that the VMM writes; for before the guest's first use. The entry's place.
    pub fn map(&mut self, va: u64, level: u32, entry: u64) -> u64 {
        self.map_in(self.root, va, level, entry)
    }

    /// Maps a page as [`Self::map`] does, in the tables of another root.
    pub fn map_in(&mut self, root: u64, va: u64, level: u32, entry: u64) -> u64 {
        let at = self.place_in(root, va, level);
        let large = if level > 1 { LARGE } else { 0 };
        self.paging.put(&self.guest.memory, at, entry | large);
        at
    }

    /// Where the entry of this level for `va` lies, with tables made where there are none.
    pub fn place_of(&mut self, va: u64, level: u32) -> u64 {
        self.place_in(self.root, va, level)
    }

    /// Where the entry for `va` lies in the tables of another root, with tables made where there are none.
    pub fn place_in(&mut self, root: u64, va: u64, level: u32) -> u64 {
        let tree = Tree { paging: self.paging, root, memory: &self.guest.memory };
        tree.make(&mut self.tables, va, level)
    }

    /// The entry at this place.
    pub fn entry(&self, at: u64) -> u64 {
        self.paging.get(self.memory(), at)
    }

    /// An operation that writes CR4. The lab's emulated CPU sets the accessed bit, which is reserved there, in the four
    /// entries at the top of PAE under TDP, and the stock module then refuses to load them with CR4.
    pub fn switch_cr4(&self, value: u64) -> Operation {
        match self.paging {
            Paging::Pae => operation::cr4_of_pae(value, self.root),
            _ => operation::cr4(value),
        }
    }

    /// Operations that clear those bits, for before paging is turned on.
    pub fn clean_tops(&self) -> Vec<Operation> {
        if self.paging != Paging::Pae {
            return Vec::new();
        }
        let tops = (self.root..).step_by(8).take(4);
        tops.map(|at| operation::write64(at, self.entry(at) & !ACCESSED)).collect()
    }

    /// An operation that writes an entry, in the way of the guest's kernel.
    pub fn set_entry(&self, at: u64, value: u64) -> Operation {
        match self.paging {
            Paging::Legacy => operation::write(at, value),
            _ => operation::write64(at, value),
        }
    }

    /// Does a list of operations without an exit that the VMM asks for; what came of each.
    pub fn run(&self, operations: &[Operation]) -> Outcome<Vec<Seen>> {
        self.load(0, operations);
        match self.guest.vcpu().run().granted("KVM_RUN")? {
            exit if exit.is_out(PORT_DONE) => Ok(self.seen(0, operations.len())),
            exit => self.stray(0, &exit),
        }
    }

    /// Does a list of operations; at each MARK the VMM acts, told how many there were before.
    pub fn run_with(
        &self,
        operations: &[Operation],
        mut act: impl FnMut(u64) -> Outcome,
    ) -> Outcome<Vec<Seen>> {
        let mut marks = 0..;
        self.run_exits(operations, |exit| match exit.is_out(PORT_MARK) {
            true => act(marks.next().unwrap_or_default()),
            false => self.stray(0, exit),
        })
    }

    /// Does a list of operations; the VMM sees every exit but the last.
    pub fn run_exits(
        &self,
        operations: &[Operation],
        mut act: impl FnMut(&Exit) -> Outcome,
    ) -> Outcome<Vec<Seen>> {
        self.load(0, operations);
        loop {
            match self.guest.vcpu().run().granted("KVM_RUN")? {
                exit if exit.is_out(PORT_DONE) => return Ok(self.seen(0, operations.len())),
                exit => act(&exit)?,
            }
        }
    }

    /// Does operations that have to come out like this, while the VMM acts at each MARK.
    pub fn expect_with(
        &self,
        what: &str,
        expected: &[(Operation, Seen)],
        act: impl FnMut(u64) -> Outcome,
    ) -> Outcome {
        let operations: Vec<Operation> = expected.iter().map(|(operation, _)| *operation).collect();
        compare(what, &self.run_with(&operations, act)?, expected)
    }

    /// Does one operation.
    pub fn one(&self, operation: Operation) -> Outcome<Seen> {
        Ok(self.run(&[operation])?[0])
    }

    /// Does operations that have to come out like this.
    pub fn expect(&self, what: &str, expected: &[(Operation, Seen)]) -> Outcome {
        let operations: Vec<Operation> = expected.iter().map(|(operation, _)| *operation).collect();
        compare(what, &self.run(&operations)?, expected)
    }

    /// Writes the list of a vCPU.
    pub fn load(&self, vcpu: usize, operations: &[Operation]) {
        assert!((operations.len() as u64) < LIST_BYTES / 64, "too many operations");
        let words = operations.iter().chain([&END]).flat_map(Operation::words);
        for (at, word) in (list(vcpu)..).step_by(8).zip(words) {
            self.memory().write(at, word);
        }
    }

    /// What a vCPU wrote down.
    pub fn seen(&self, vcpu: usize, operations: usize) -> Vec<Seen> {
        let word = |index: usize, at| self.memory().read(list(vcpu) + index as u64 * 64 + at);
        let of =
            |index| Seen::of(word(index, 24), word(index, 32), word(index, 40), word(index, 48));
        (0..operations).map(of).collect()
    }

    /// An exit that the list does not ask for.
    pub fn stray<T>(&self, vcpu: usize, exit: &Exit) -> Outcome<T> {
        let regs = self.guest.vcpus[vcpu].regs()?;
        let step = regs.rsi.wrapping_sub(list(vcpu)) / 64;
        fail(format!("expected the list's end got {exit:x?} at step {step}, rip {:#x}", regs.rip))
    }
}

fn compare(what: &str, seen: &[Seen], expected: &[(Operation, Seen)]) -> Outcome {
    for (index, (seen, (operation, expected))) in seen.iter().zip(expected).enumerate() {
        equal(&format!("{what}: step {index}, {operation:x?}"), *seen, *expected)?;
    }
    Ok(())
}

/// The number of a frame.
pub fn tag(frame: u64) -> u64 {
    0x5a00_0000 | frame >> 12
}

/// Writes a frame: code that returns `number`, which is at +8, too.
pub fn mark(memory: &Memory, frame: u64, number: u64) {
    // mov $number, %eax; ret
    memory.write(frame, 0xc3 << 40 | (number & 0xffff_ffff) << 8 | 0xb8);
    memory.write(frame + 8, number);
}
