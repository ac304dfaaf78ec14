//! The task switch, for CPUs that leave it to the hypervisor: TSSs of 16 and 32 bits, by CALL, JMP, IRET
//! and task gates.
//!
//! SDM vol. 3A §8.3 (the steps), table 8-1 (the faults and the task that takes them), §8.2 (TSSs).
//!
//! Why all that can fault for the old task comes before the first store: a fault there must find the old task as it was.
//! From the load of the new TSS on, faults are the new task's, and its state is what the handler sees.

use iced_x86::Instruction;
use x86::segment::kind;
use x86::{Cr0, Dr6, Exception, Gva, Rflags};

use crate::descriptor::{BUSY, Found, Load, error_code, is_null, rpl, v86_segment};
use crate::machine::{CodeSize, Machine, SegReg, Segment, Stop};
use crate::operand::{Run, Scope};

/// What asked for the switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// CALL: the new task is nested.
    Call,
    /// IRET with NT set: back to the task that the TSS names.
    Iret,
    /// A far JMP.
    Jmp,
    /// An event through a task gate of the IDT: nested.
    Gate,
}

impl Source {
    const fn nests(self) -> bool {
        matches!(self, Self::Call | Self::Gate)
    }
}

/// A task switch to be made. The processor has looked at the gate, if there was one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskSwitch {
    /// Selector of the new task's TSS.
    pub selector: u16,
    /// What asked for it.
    pub source: Source,
    /// RIP that the old task goes on at.
    pub return_to: u64,
    /// The instruction at that RIP did not complete: the old task's RF is set.
    pub restarts: bool,
    /// The event's error code, which goes onto the new task's stack.
    pub error_code: Option<u32>,
    /// The event came from outside of the program: bit 0 of the faults' error codes.
    pub external: bool,
}

/// The new task, whose general and segment registers are set already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Switched {
    /// RIP of the new task.
    pub rip: u64,
    /// RFLAGS of the new task.
    pub rflags: Rflags,
    /// What the new task takes before its first instruction.
    pub exception: Option<Exception>,
}

/// Where a TSS has what.
struct Layout {
    len: u32,
    /// IP, flags, then eight registers; the step from one to the next.
    ip: usize,
    step: usize,
    /// ES, CS, SS, DS and, with 32 bits, FS and GS.
    segments: usize,
    ldt: usize,
    wide: bool,
}

const TSS16: Layout = Layout { len: 44, ip: 14, step: 2, segments: 34, ldt: 42, wide: false };
const TSS32: Layout = Layout { len: 104, ip: 32, step: 4, segments: 72, ldt: 96, wide: true };
const CR3: usize = 28;
const TRAP: usize = 100;

/// In the order of a TSS.
const SEGMENTS: [SegReg; 6] =
    [SegReg::Es, SegReg::Cs, SegReg::Ss, SegReg::Ds, SegReg::Fs, SegReg::Gs];

type Image = [u8; 104];

impl Layout {
    const fn of(kind: u8) -> Option<&'static Self> {
        match kind {
            kind::TSS16_AVAILABLE | kind::TSS16_BUSY => Some(&TSS16),
            kind::TSS_AVAILABLE | kind::TSS_BUSY => Some(&TSS32),
            _ => None,
        }
    }

    fn segment_count(&self) -> usize {
        if self.wide { 6 } else { 4 }
    }

    fn get(&self, image: &Image, at: usize) -> u64 {
        let mut word = [0; 8];
        for (to, from) in word.iter_mut().zip(image.iter().skip(at).take(self.step)) {
            *to = *from;
        }
        u64::from_le_bytes(word)
    }

    fn put(&self, image: &mut Image, at: usize, value: u64) {
        let word = value.to_le_bytes();
        for (to, from) in image.iter_mut().skip(at).zip(word.iter().take(self.step)) {
            *to = *from;
        }
    }

    /// Offset of word `n` after IP: the flags, the registers.
    const fn word(&self, n: usize) -> usize {
        self.ip.wrapping_add(n.wrapping_mul(self.step))
    }

    const fn segment(&self, n: usize) -> usize {
        self.segments.wrapping_add(n.wrapping_mul(self.step))
    }
}

/// Switches tasks. Until the new task's state is loaded a fault is the old task's (`Err`), then it is
/// the new one's.
///
/// # Errors
/// [`Stop::Fault`]: nothing happened, and the old task takes it. [`Stop::Retry`]: nothing happened.
/// [`Stop::Unsupported`]: the tables or the stack lie in device memory.
pub fn switch_task<M: Machine>(m: &mut M, switch: &TaskSwitch) -> Result<Switched, Stop> {
    let (size, flags, rip) = (m.code_size(), m.rflags(), m.rip());
    // There are no tasks in long mode, and the processor refused before.
    if m.long_mode() || size == CodeSize::Bits64 {
        return Err(Stop::Unsupported);
    }
    let insn = Instruction::default();
    let interrupt_shadow = false;
    let mut run =
        Run { m, insn: &insn, size, flags, next_rip: rip, interrupt_shadow, scope: Scope::Exits };
    match run.task(switch) {
        // A task switch cannot be replayed: by then its first stores are made.
        Err(Stop::NeedUser) => Err(Stop::Unsupported),
        other => other,
    }
}

impl<M: Machine> Run<'_, M> {
    fn task(&mut self, switch: &TaskSwitch) -> Result<Switched, Stop> {
        let outside = u32::from(switch.external);
        let code = error_code(switch.selector) | outside;
        let refused = Stop::Fault(match switch.source {
            Source::Iret => Exception::ts(code),
            _ => Exception::gp(code),
        });
        // A TSS has its descriptor in the GDT alone (SDM vol. 3A §8.2.2).
        if is_null(switch.selector) || switch.selector & 4 != 0 {
            return Err(refused);
        }
        let mut new = self.descriptor(switch.selector)?.ok_or(refused)?;
        let s = new.segment;
        let busy = s.kind() & BUSY != 0;
        let layout = Layout::of(s.kind()).filter(|_| !s.has(Segment::S)).ok_or(refused)?;
        // Only IRET goes back to a task that is busy: else a task would be entered twice (SDM vol.
        // 3A §8.3).
        if busy != (switch.source == Source::Iret) {
            return Err(refused);
        }
        if !s.has(Segment::PRESENT) {
            return Err(Stop::Fault(Exception::np(code)));
        }
        // The limit is that of the last byte.
        if s.limit < layout.len.wrapping_sub(1) {
            return Err(Stop::Fault(Exception::ts(code)));
        }
        // The old task's TSS by the register's hidden part: its descriptor in memory may have
        // changed.
        let old = self.m.segment(SegReg::Tr);
        let old_code = error_code(old.selector) | outside;
        let old_refused = Stop::Fault(Exception::ts(old_code));
        let old_layout = Layout::of(old.kind()).ok_or(old_refused)?;
        if old.limit < old_layout.len.wrapping_sub(1) {
            return Err(old_refused);
        }

        // All that can fault for the old task, before anything is written.
        let mut image: Image = [0; 104];
        let len = layout.len as usize;
        // Read whole now: from here on the new task's values are ours, whatever another CPU stores
        // there.
        self.read_system(s.base, 0, image.get_mut(..len).unwrap_or(&mut []))?;
        // Two pages at most, so that the first and the last byte stand for all.
        self.probe_system(old.base, old_layout.len)?;
        if switch.source.nests() {
            self.probe_system(s.base, 2)?;
        }
        // The old task stays busy where the new one is nested in it: its TSS is where the way back
        // leads.
        let mut old_descriptor = match switch.source {
            Source::Jmp | Source::Iret => self.descriptor(old.selector)?,
            _ => None,
        };
        if let Some(found) = &old_descriptor {
            self.probe_descriptor(found)?;
        }
        // Probing asks for write access now, so that the stores below cannot fault unless another CPU takes it away.
        self.probe_descriptor(&new)?;

        // The old task is put away.
        if let Some(found) = &mut old_descriptor {
            self.mark(found, 0, BUSY)?;
        }
        self.save_task(switch, &old, old_layout)?;
        if switch.source.nests() {
            // The back link, by which IRET returns.
            self.write_system(s.base, 0, &old.selector.to_le_bytes())?;
        }
        if switch.source != Source::Iret {
            self.mark(&mut new, BUSY, 0)?;
        }
        self.m.set_segment(SegReg::Tr, new.segment);

        // From here on it is the new task that faults.
        let mut flags =
            Rflags::from_bits_truncate(layout.get(&image, layout.word(1))) | Rflags::FIXED;
        if switch.source.nests() {
            flags |= Rflags::NT;
        }
        self.flags = flags;
        let rip = layout.get(&image, layout.word(0));
        let exception = match self.load_task(switch, &image, layout) {
            Ok(()) => {
                // Only a 32-bit TSS has the debug trap flag.
                let trap = layout.wide && image.get(TRAP).is_some_and(|byte| byte & 1 != 0);
                trap.then_some(Exception::db(Dr6::BT))
            }
            Err(Stop::Fault(mut fault)) => {
                if matches!(fault.vector.0, 10..=13) {
                    // Faults of segments have an EXT bit; a page fault's error code has another
                    // meaning there.
                    fault.error_code = fault.error_code.map(|code| code | outside);
                }
                Some(fault)
            }
            // Half of the state is the new task's: this cannot be tried again.
            Err(_) => return Err(Stop::Unsupported),
        };
        Ok(Switched { rip, rflags: flags, exception })
    }

    fn probe_descriptor(&mut self, found: &Found) -> Result<(), Stop> {
        self.m.probe_system(Gva(found.place()))
    }

    /// Writes the old task's registers into its TSS.
    fn save_task(
        &mut self,
        switch: &TaskSwitch,
        old: &Segment,
        layout: &Layout,
    ) -> Result<(), Stop> {
        let mut image: Image = [0; 104];
        let mut flags = self.flags;
        // The task that ends by IRET is nested no more.
        if switch.source == Source::Iret {
            flags -= Rflags::NT;
        }
        if switch.restarts {
            flags |= Rflags::RF;
        }
        layout.put(&mut image, layout.word(0), switch.return_to);
        layout.put(&mut image, layout.word(1), flags.bits());
        for n in 0..8usize {
            let value = self.m.gpr(n);
            layout.put(&mut image, layout.word(n.wrapping_add(2)), value);
        }
        for (n, segment) in SEGMENTS.into_iter().take(layout.segment_count()).enumerate() {
            let selector = self.m.segment(segment).selector;
            layout.put(&mut image, layout.segment(n), selector.into());
        }
        // IP to the last segment: what lies around them is the system's.
        let bytes = image.get(layout.ip..layout.ldt).unwrap_or(&[]);
        self.write_system(old.base, layout.ip as u64, bytes)
    }

    fn load_task(
        &mut self,
        switch: &TaskSwitch,
        image: &Image,
        layout: &Layout,
    ) -> Result<(), Stop> {
        let selectors: [u16; 6] = core::array::from_fn(|n| {
            if n < layout.segment_count() { layout.get(image, layout.segment(n)) as u16 } else { 0 }
        });
        let [es, cs, ss, ds, fs, gs] = selectors;
        // Of the new task's flags, which are in place by now.
        let v86 = self.flags.contains(Rflags::VM);
        let cpl = if v86 { 3 } else { rpl(cs) };
        for n in 0..8usize {
            let value = layout.get(image, layout.word(n.wrapping_add(2)));
            // A TSS of 16 bits leaves the upper halves alone.
            let kept = if layout.wide { 0 } else { self.m.gpr(n) & 0xffff_0000 };
            self.m.set_gpr(n, kept | value);
        }
        // Selectors are in place before descriptors are looked at; what cannot be loaded stays unusable,
        // but a CPU is never without CS and SS.
        for (segment, selector) in SEGMENTS.into_iter().zip(selectors) {
            let hidden = match segment {
                SegReg::Cs | SegReg::Ss => self.m.segment(segment).with_dpl(cpl),
                _ => Segment::default(),
            };
            self.m.set_segment(segment, Segment { selector, ..hidden });
        }
        let ldt = layout.get(image, layout.ldt) as u16;
        self.m.set_segment(SegReg::Ldtr, Segment { selector: ldt, ..Segment::default() });
        let cr0 = self.m.cr0();
        // The FPU still holds the old task's registers: the new one's first use of it is to trap.
        self.m.write_cr(0, (cr0 | Cr0::TS).bits())?;
        // A TSS of 16 bits has no CR3, and without paging it means nothing.
        if layout.wide && cr0.contains(Cr0::PG) {
            let cr3 = layout.get(image, CR3);
            self.m.write_cr(3, cr3)?;
        }
        // Before the segments: their selectors may name the local table.
        self.load_task_ldt(ldt)?;
        if v86 {
            for (segment, selector) in SEGMENTS.into_iter().zip(selectors) {
                self.m.set_segment(segment, v86_segment(selector));
            }
        } else {
            // CS first: its RPL is the level that the others are checked at.
            let segment = self.task_code(cs)?;
            self.m.set_segment(SegReg::Cs, segment);
            let rest = [
                (SegReg::Ss, ss),
                (SegReg::Ds, ds),
                (SegReg::Es, es),
                (SegReg::Fs, fs),
                (SegReg::Gs, gs),
            ];
            for (register, selector) in rest {
                let segment = self.protected(register, selector, Load::Task { cpl })?;
                self.m.set_segment(register, segment);
            }
        }
        match switch.error_code {
            // Last: onto the new task's stack, whose segment is loaded now.
            Some(code) => self.push(code.into(), layout.step as u8),
            None => Ok(()),
        }
    }

    fn load_task_ldt(&mut self, selector: u16) -> Result<(), Stop> {
        if is_null(selector) {
            return Ok(());
        }
        let refused = Stop::Fault(Exception::ts(error_code(selector)));
        if selector & 4 != 0 {
            return Err(refused);
        }
        let found = self.descriptor(selector)?.ok_or(refused)?;
        let s = found.segment;
        if s.has(Segment::S) || s.kind() != kind::LDT || !s.has(Segment::PRESENT) {
            return Err(refused);
        }
        self.m.set_segment(SegReg::Ldtr, s);
        Ok(())
    }

    /// The new task's CS, whose RPL is its privilege level.
    fn task_code(&mut self, selector: u16) -> Result<Segment, Stop> {
        let refused = Stop::Fault(Exception::ts(error_code(selector)));
        if is_null(selector) {
            return Err(refused);
        }
        let mut found = self.descriptor(selector)?.ok_or(refused)?;
        let s = found.segment;
        let level = if s.has(Segment::CONFORMING) {
            s.dpl() <= rpl(selector)
        } else {
            s.dpl() == rpl(selector)
        };
        if !s.has(Segment::S) || !s.has(Segment::CODE) || !level {
            return Err(refused);
        }
        if !s.has(Segment::PRESENT) {
            return Err(Stop::Fault(Exception::np(error_code(selector))));
        }
        self.mark(&mut found, Segment::ACCESSED as u8, 0)?;
        Ok(found.segment)
    }
}
