//! L2 runs: it changes its registers, exits, and L0 or L1 hears of it.

use gannet_nested_vmx::GuestMemory;
use gannet_nested_vmx::events::{self, Event, Gate, State};
use gannet_nested_vmx::leave::host::{self, Kept};
use gannet_nested_vmx::leave::{Known, Report};
use gannet_nested_vmx::machine::{Instruction, Place, Switch};
use gannet_nested_vmx::priority::{self, Access, Moved};
use gannet_nested_vmx::reflect::{self, Claim, Wants};
use x86::vmcs::ExitReason;
use x86::{Exception, Gpa};

use super::Wrong;
use super::exits::{Exit, Gprs};
use super::fields::{self, Fields};
use super::left::{self, Told};
use super::reference::{Model, is_ept_pointer};
use super::rig::{CPU, KNOWN, L0};
use super::run::{Checked, Run, same};

/// MSRs: of both ranges, outside of them, of the x2APIC.
const MSRS: [u64; 14] = [
    0x10,
    0x1b,
    0x174,
    0x1fff,
    0x2000,
    0xc000_0080,
    0xc000_1fff,
    0xc000_2000,
    0x4b56_4d00,
    0x808,
    0x80b,
    0x83f,
    0x802,
    0xffff_ffff,
];
/// Exits for which a CPU clears the qualification, and of which nobody is to read it.
const UNQUALIFIED: [u64; 16] = [1, 2, 3, 7, 8, 10, 12, 15, 16, 18, 31, 32, 40, 51, 54, 55];
/// What makes an instruction: an exit for one has a length.
const REASONS: [u64; 59] = [
    0, 1, 2, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29,
    30, 31, 32, 36, 37, 39, 40, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59,
    60, 61, 62, 63, 64, 67, 68, 74, 75, 17,
];
/// Those with more to them, which come more often.
const RICH: [u64; 11] = [0, 0, 23, 25, 28, 28, 30, 31, 32, 48, 59];

impl Model {
    /// Whether an L2 that is entered halted sleeps, or waits for a SIPI (§27.7.2, §27.7.3, §27.7.5, §27.7.6).
    pub fn sleeps(&self) -> u64 {
        let v = &self.now().fields;
        let interrupt_window = v.primary(2) && v.bit(0x6820, 9);
        let nmi_window = v.primary(22) && !v.bit(0x4824, 3);
        let debug = v.bit(0x6822, 14) || v.bit(0x6822, 12);
        match v.get(0x4826) {
            1 if v.bit(0x4016, 31) || debug || interrupt_window || nmi_window => 0,
            state => state,
        }
    }

    /// What becomes of an event (§26.2, §26.3.2; SDM vol. 3A §6.9).
    fn gate(&self, event: Event, state: &State) -> Gate {
        let v = &self.now().fields;
        let waits = v.get(0x4826) == 3;
        let held = |asked| if asked { Gate::Hold } else { Gate::Drop };
        match event {
            Event::Init if waits => Gate::Drop,
            Event::Init => Gate::ExitToL1,
            Event::Sipi(_) if waits => Gate::ExitToL1,
            Event::Sipi(_) => Gate::Drop,
            _ if waits => Gate::Hold,
            Event::MonitorTrap | Event::PreemptionTimer if state.injecting => Gate::Hold,
            Event::MonitorTrap | Event::PreemptionTimer => Gate::ExitToL1,
            Event::Smi if state.injecting => Gate::Hold,
            Event::Smi => Gate::Deliver,
            Event::Nmi => Self::asynchronous(v.bit(0x4000, 3), state.nmis_blocked, state.injecting),
            Event::Interrupt => {
                Self::asynchronous(v.bit(0x4000, 0), state.interrupts_blocked, state.injecting)
            }
            Event::NmiWindow if state.injecting || state.nmis_blocked => held(v.primary(22)),
            Event::InterruptWindow if state.injecting || state.interrupts_blocked => {
                held(v.primary(2))
            }
            Event::NmiWindow if v.primary(22) => Gate::ExitToL1,
            Event::InterruptWindow if v.primary(2) => Gate::ExitToL1,
            Event::NmiWindow | Event::InterruptWindow => Gate::Drop,
        }
    }

    fn asynchronous(exits: bool, blocked: bool, injecting: bool) -> Gate {
        match (exits, injecting) {
            (true, true) => Gate::Hold,
            (true, false) => Gate::ExitToL1,
            (false, false) if !blocked => Gate::Deliver,
            (false, _) => Gate::Window,
        }
    }

    /// VMFUNC (§26.5.6).
    fn vmfunc(
        &mut self,
        eax: u32,
        ecx: u32,
        physical_bits: u8,
        memory: &impl GuestMemory,
    ) -> Switch {
        let v = &self.now().fields;
        if !v.secondary(13) || eax >= 64 {
            return Switch::Undefined;
        }
        let last = if self.is(Wrong::FunctionList) { 512 } else { 511 };
        if eax != 0 || !v.bit(0x2018, 0) || !v.secondary(1) || ecx > last {
            return Switch::Exit;
        }
        let Ok(pointer) = memory.read_u64(Gpa(v.get(0x2024) + u64::from(ecx) * 8)) else {
            return Switch::Exit;
        };
        if pointer == v.get(0x201a) {
            return Switch::Same;
        }
        if !is_ept_pointer(pointer, self.capabilities.ept_vpid.0, physical_bits) {
            return Switch::Exit;
        }
        self.set(0x201a, pointer);
        Switch::Ept(pointer)
    }
}

impl Run {
    pub fn l2(&mut self) -> Checked {
        if self.asleep != 0 || self.random.one_in(8) {
            return self.event();
        }
        self.live();
        let (exit, gprs) = self.exit();
        let told = |why| format!("{exit:x?} with {gprs:x?}: {why}");
        self.exits(&exit, &gprs).map_err(told)
    }

    /// L2 gives one of its registers another value.
    pub fn change(&mut self, field: u16, value: u64) {
        let l2 = self.model.l2.as_mut().unwrap();
        l2.set(field, value);
        let value = value & fields::mask(field);
        let own = match field {
            0x6800 => L0.cr0_mask,
            0x6804 => L0.cr4_mask,
            _ => 0,
        };
        // Of a control register L0's bits are in the shadow, and only L2's in the register.
        let hardware = &mut self.hardware.values;
        if own != 0 {
            let mask = 0x6000 + (field - 0x6800) / 2;
            let of_l0 = own & !self.model.now().fields.get(mask);
            let (mask, shadow) = (usize::from(mask), usize::from(mask) + 4);
            let owned = hardware[mask];
            hardware[shadow] = hardware[shadow] & !of_l0 | value & of_l0;
            hardware[usize::from(field)] = hardware[usize::from(field)] & owned | value & !owned;
        } else {
            hardware[usize::from(field)] = value;
        }
    }

    fn l2_has(&self, field: u16) -> u64 {
        self.model.l2.as_ref().unwrap().get(field)
    }

    /// L2 does something, in its mode.
    fn live(&mut self) {
        let flags = self.l2_has(0x6820);
        let wide = self.l2_has(0x2806) >> 10 & 1 != 0 && self.l2_has(0x4816) >> 13 & 1 != 0;
        let number = self.random.next();
        self.change(0x681e, number & if wide { 0x7fff_ffff_ffff } else { 0xffff_ffff });
        self.change(0x681c, self.l2_has(0x681c) ^ number >> 32);
        let flags = flags & !0x4_0ed5 | self.random.next() & 0x4_0ed5;
        self.change(0x6820, flags);
        // Interruptibility, and what is pending by it.
        let blocked = match number % 8 {
            0 if flags & 0x200 != 0 => 1,
            1 => 2,
            2 => 8,
            _ => 0,
        };
        self.change(0x4824, blocked);
        let step = u64::from(blocked & 3 != 0 && flags & 0x100 != 0);
        self.change(0x6822, step << 14);
        if number >> 8 & 1 != 0 {
            self.live_in_registers();
        }
        if number >> 9 & 1 != 0 && flags >> 17 & 1 == 0 {
            self.live_in_segments();
        }
    }

    fn live_in_registers(&mut self) {
        let (a, b) = (self.random.next(), self.random.next());
        // MP, TS, AM, WP and CD; TSD, DE, PGE and OSFXSR: as far as L1 lets it.
        let (cr0, cr4) = (self.model.get(0x6000), self.model.get(0x6002));
        self.change(0x6800, self.l2_has(0x6800) ^ a & 0x4005_000a & !cr0);
        self.change(0x6804, self.l2_has(0x6804) ^ b & 0x28c & !cr4);
        self.change(0x6802, a >> 20 & 0xf_f000);
        self.change(0x681a, 0x400 | b >> 20 & 0x3ff);
        self.change(0x6824, a & 0x7fff_ffff_f000);
        self.change(0x6826, b & 0x7fff_ffff_f000);
        self.change(0x482a, a >> 8);
        if a & 7 == 0 {
            self.change(0x2806, self.l2_has(0x2806) ^ b & 0x801);
            self.change(0x2804, [0x0007_0406_0007_0406, 0x0606_0606_0606_0606][b as usize & 1]);
        }
        // PAE paging with EPT: MOV to CR3 loads the entries.
        if a & 0x18 == 0 && self.has_page_directories() {
            self.change(0x280a, b & 0x1f_f000 | 1);
        }
        if a & 0xe0 == 0 {
            self.leave_long_mode();
        }
    }

    /// L2 is in PAE paging, and the exit saves its PDPTEs.
    fn has_page_directories(&self) -> bool {
        let pae = self.l2_has(0x6800) >> 31 != 0 && self.l2_has(0x6804) >> 5 & 1 != 0;
        pae && self.l2_has(0x2806) >> 10 & 1 == 0 && self.model.now().fields.secondary(1)
    }

    /// An unrestricted L2 in compatibility mode switches paging off, as far as L1 lets it.
    fn leave_long_mode(&mut self) {
        let compatibility =
            self.l2_has(0x2806) >> 10 & 1 != 0 && self.l2_has(0x4816) >> 13 & 1 == 0;
        let free = self.model.get(0x6000) >> 31 == 0 && self.l2_has(0x6804) >> 17 & 1 == 0;
        if compatibility && free && self.model.now().fields.secondary(7) {
            self.change(0x6800, self.l2_has(0x6800) & !(1 << 31));
            self.change(0x2806, self.l2_has(0x2806) & !(1 << 10));
            // What the hardware does by itself.
            self.hardware.values[0x4012] &= !(1 << 9);
        }
    }

    fn live_in_segments(&mut self) {
        let (a, b) = (self.random.next(), self.random.next());
        // RPL and TI stay: the next entry checks them.
        for (n, field) in [0x0800u16, 0x0806, 0x0808, 0x080a, 0x080e].into_iter().enumerate() {
            if a >> n & 1 != 0 {
                self.change(field, self.l2_has(field) & 7 | b >> n & 0xfff8);
            }
        }
        self.change(0x680e, a & 0x7fff_ffff_ffff);
        self.change(0x6810, !b | 0xffff_8000_0000_0000);
        self.change(0x6816, b & 0x7fff_ffff_ffff);
        self.change(0x6818, a & 0x7fff_ffff_ffff);
        self.change(0x4810, a >> 16 & 0xffff);
        self.change(0x4812, b >> 16 & 0xffff);
    }

    /// What the hardware tells, with L2's general registers.
    fn exit(&mut self) -> (Exit, Gprs) {
        let r = &mut self.random;
        let reason = if r.one_in(2) { r.of(&RICH) } else { r.of(&REASONS) };
        let mut gprs: Gprs = core::array::from_fn(|_| r.next() >> r.below(64));
        gprs[1] = r.of(&MSRS) | r.next() << 32;
        let mut x = Exit {
            reason,
            length: r.below(16),
            information: r.next() & 0xffff_ffff,
            linear: r.next(),
            physical: r.next() & 0xff_ffff_ffff,
            ..Exit::default()
        };
        if left::is_qualified(reason) || UNQUALIFIED.contains(&reason) {
            x.qualification = r.next() & 0xffff_ffff;
        }
        if reason == 0 {
            x.interruption = Self::some_event(r, true);
        } else {
            x.interruption = r.next() & 0x7fff_ffff;
        }
        x.error_code = r.below(0x20);
        x.vectoring = match left::is_in_delivery(reason) && r.one_in(2) {
            true => Self::some_event(r, false) | r.below(2) << 12,
            false => r.next() & 0x7fff_ffff,
        };
        x.vectoring_error = r.below(0x20);
        match reason {
            23 | 25 => {
                let at = (x.information >> 28 & 15) as usize;
                gprs[at] = u64::from(r.field()) ^ u64::from(r.one_in(8)) << r.below(64);
            }
            28 => x.qualification = self.register_access(&mut gprs),
            30 => {
                let r = &mut self.random;
                let port = r.of(&[0, 0x3f8, 0x7ffd, 0x7fff, 0x8000, 0xfffd, 0xffff, r.0 & 0xffff]);
                x.qualification = x.qualification & 0x78 | port << 16 | r.of(&[0, 1, 3]);
            }
            59 => {
                let r = &mut self.random;
                let last = r.of(&[511, 512, r.0 & 0x3ff]);
                (gprs[0], gprs[1]) = (r.of(&[0, 0, 0, 1, 63, 64]), last);
            }
            _ => {}
        }
        (x, gprs)
    }

    /// Interruption information of an exception or NMI, or of any event.
    fn some_event(r: &mut super::random::Random, exits: bool) -> u64 {
        let vector = r.of(&[0u64, 1, 3, 6, 8, 10, 13, 14, 14, 14, 17, 18]);
        let code = u64::from(matches!(vector, 8 | 10..=14 | 17)) << 11;
        1 << 31
            | match r.below(8) {
                0 => 0x202,
                1 => 0x603,
                2 if !exits => 0x480,
                3 if !exits => r.below(256),
                _ => 0x300 | vector | code,
            }
    }

    /// An access to a control register: often one that changes little of what L2 believes it to be.
    fn register_access(&mut self, gprs: &mut Gprs) -> u64 {
        let r = &mut self.random;
        let (kind, number, register) = (r.below(4), r.of(&[0u64, 3, 4, 8]), r.below(16));
        let shadow = match number {
            4 => self.model.get(0x6006),
            _ => self.model.get(0x6004),
        };
        let r = &mut self.random;
        let low = r.below(4) * r.below(2);
        let near = shadow ^ 1 << if kind == 3 { low } else { r.below(34) };
        match kind {
            2 => 2 << 4,
            3 => 3 << 4 | r.below(2) << 6 | (near & 0xf) << 16,
            _ => {
                gprs[register as usize] = if number == 8 { r.below(20) } else { near };
                let wide = self.l2_has(0x2806) >> 10 & 1 != 0 && self.l2_has(0x4816) >> 13 & 1 != 0;
                // Without REX.R there is no CR8.
                let number = if number == 8 && !wide { 3 } else { number };
                number | kind << 4 | register << 8
            }
        }
    }

    /// The hardware has left L2.
    fn exits(&mut self, x: &Exit, gprs: &Gprs) -> Checked {
        let hardware = &mut self.hardware.values;
        for (encoding, value) in [
            (0x4402, x.reason),
            (0x6400, x.qualification),
            (0x4404, x.interruption),
            (0x4406, x.error_code),
            (0x4408, x.vectoring),
            (0x440a, x.vectoring_error),
            (0x440c, x.length),
            (0x440e, x.information),
            (0x640a, x.linear),
            (0x2400, x.physical),
        ] {
            hardware[encoding] = value;
        }
        hardware[0x4016] &= 0x7fff_ffff;
        self.interrupted = None;
        let wants = Wants {
            page_faults: self.random.one_in(4),
            debug: if self.random.one_in(4) { 1 << self.random.below(32) } else { 0 },
        };
        let claim =
            reflect::claim(self.machine.vmcs12(), &self.hardware, gprs, &wants, &self.memory);
        same("whose", claim, self.model.whose(x, gprs, &wants, &self.memory))?;
        // What the walk of L1's tables makes L1's.
        let walked = matches!(x.reason, 48 | 49) && self.random.one_in(2);
        match claim {
            Claim::L1 => self.reflect(x),
            Claim::L0 if walked => self.reflect(x),
            Claim::L0 => self.keep(x, gprs),
            Claim::Priority(access) => self.priority(access),
            Claim::Function => self.function(x, gprs),
        }
    }

    /// L1 sees the exit as the hardware has it.
    fn reflect(&mut self, x: &Exit) -> Checked {
        let report = Report::of(&self.hardware);
        let told = Told::of(x, &self.model);
        self.leave(&report, &told)
    }

    /// L0 handles the exit.
    fn keep(&mut self, x: &Exit, gprs: &Gprs) -> Checked {
        *self.counts.kept.entry(x.reason).or_default() += 1;
        if matches!(x.reason, 23 | 25) {
            return self.serve(x, gprs);
        }
        self.interrupted = events::interrupted(&self.hardware);
        let valid = x.vectoring >> 31 != 0;
        same("an event is interrupted", self.interrupted.is_some(), valid)
    }

    /// L2's VMREAD or VMWRITE of the shadow VMCS.
    fn serve(&mut self, x: &Exit, gprs: &Gprs) -> Checked {
        self.counts.served += 1;
        let long = self.l2_has(0x2806) >> 10 & 1 != 0;
        let cpl = if self.random.one_in(8) { 3 } else { 0 };
        let cpu = gannet_nested_vmx::machine::Cpu { cpl, long_mode: long, is_64_bit: long, ..CPU };
        let field = gprs[(x.information >> 28 & 15) as usize];
        let instruction = if x.reason == 23 {
            Instruction::Vmread { field, to: Place::Register(5) }
        } else {
            Instruction::Vmwrite { field, from: Place::Register(5), value: gprs[5] }
        };
        self.execute(instruction, &cpu)
    }

    /// MOV to and from CR8, on the virtual-APIC page (§30.3).
    fn priority(&mut self, access: Access) -> Checked {
        let v = &self.model.now().fields;
        let (at, threshold, virtualized) =
            (v.get(0x2012) + 0x80, v.get(0x401c) & 15, v.secondary(9));
        match access {
            Access::Read { .. } => {
                self.counts.priority += 1;
                let value = self.memory.read_u8(Gpa(at)).map_or(15, |byte| u64::from(byte >> 4));
                same("CR8", priority::read(self.machine.vmcs12(), &self.memory), value)
            }
            // What follows from virtual interrupts has tests of its own.
            Access::Write { value } if !virtualized && self.has_apic_page() => {
                self.counts.priority += 1;
                let moved = priority::write(self.machine.vmcs12(), value, &self.memory);
                if value > 15 {
                    return same("MOV to CR8", moved, Err(Exception::gp(0)));
                }
                let stored = self.memory.read_u32(Gpa(at)).unwrap();
                same("VTPR", stored, (value as u32) << 4)?;
                let below = if self.model.is(Wrong::Threshold) {
                    value <= threshold
                } else {
                    value < threshold
                };
                same("MOV to CR8", moved, Ok(if below { Moved::Fell } else { Moved::On }))?;
                match below {
                    true => self.leave(
                        &Report::plain(ExitReason::TprBelowThreshold, 0),
                        &Told::plain(43, 0),
                    ),
                    false => Ok(()),
                }
            }
            _ => Ok(()),
        }
    }

    fn function(&mut self, x: &Exit, gprs: &Gprs) -> Checked {
        self.counts.functions += 1;
        let (eax, ecx, limits) = (gprs[0] as u32, gprs[1] as u32, self.limits());
        let expected = self.model.vmfunc(eax, ecx, limits.physical_bits, &self.memory);
        let switch = self.machine.vmfunc(eax, ecx, &limits, &self.memory);
        same("VMFUNC", switch, expected)?;
        match switch {
            Switch::Exit => self.reflect(x),
            _ => Ok(()),
        }
    }

    /// Something comes from outside.
    fn event(&mut self) -> Checked {
        let r = &mut self.random;
        let event = r.of(&[
            Event::Init,
            Event::Sipi(0x9a),
            Event::MonitorTrap,
            Event::PreemptionTimer,
            Event::Smi,
            Event::Nmi,
            Event::NmiWindow,
            Event::Interrupt,
            Event::InterruptWindow,
        ]);
        let state = State {
            entry_pending: false,
            injecting: self.interrupted.is_some(),
            interrupts_blocked: r.one_in(2),
            nmis_blocked: r.one_in(2),
            smm: false,
        };
        let told = |why| format!("{event:?} with {state:?}: {why}");
        let gate = events::gate(self.machine.vmcs12(), event, &state);
        same("the event", gate, self.model.gate(event, &state)).map_err(told)?;
        match gate {
            Gate::ExitToL1 => self.leave_for(event).map_err(told),
            Gate::Deliver => {
                // It wakes an L2 that halts.
                self.asleep = if self.asleep == 1 { 0 } else { self.asleep };
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn leave_for(&mut self, event: Event) -> Checked {
        self.counts.events += 1;
        let acknowledges = events::acknowledges(self.machine.vmcs12());
        same("acknowledges", acknowledges, self.model.now().fields.bit(0x400c, 15))?;
        let vector = acknowledges.then_some(0x31);
        let mut told = match event {
            Event::Init => Told::plain(3, 0),
            Event::Sipi(vector) => Told::plain(4, vector.into()),
            Event::MonitorTrap => Told::plain(37, 0),
            Event::PreemptionTimer => Told::plain(52, 0),
            Event::Nmi => Told { interruption: 0x8000_0202, ..Told::plain(0, 0) },
            Event::NmiWindow => Told::plain(8, 0),
            Event::Interrupt if acknowledges => {
                Told { interruption: 0x8000_0031, ..Told::plain(1, 0) }
            }
            Event::Interrupt => Told::plain(1, 0),
            Event::InterruptWindow => Told::plain(7, 0),
            Event::Smi => unreachable!(),
        };
        let mut report = events::report(event, vector);
        if let Some(interrupted) = self.interrupted.take() {
            events::tell_interrupted(&mut report, interrupted);
            // As of the exit that has interrupted it; bit 12 is undefined.
            let h = &self.hardware.values;
            told.vectoring = h[0x4408] & !(1 << 12);
            told.vectoring_error = h[0x440a];
            if matches!(told.vectoring >> 8 & 7, 4..=6) {
                told.length = h[0x440c];
            }
        }
        self.leave(&report, &told)
    }

    /// L1 goes on.
    fn leave(&mut self, report: &Report, told: &Told) -> Checked {
        *self.counts.reflected.entry(told.reason).or_default() += 1;
        let timer = self.random.next() & 0xffff_ffff;
        let h = &self.hardware.values;
        self.known = Known {
            activity: self.asleep as u32,
            preemption_timer: timer as u32,
            pat: h[0x2804],
            efer: h[0x2806],
            debugctl: h[0x2802],
            ..KNOWN
        };
        let (cr0, efer, pdptes) =
            (self.l2_has(0x6800), self.l2_has(0x2806), self.has_page_directories());
        let l2: Fields = self.model.l2.clone().unwrap();
        self.model.left(told, self.asleep, timer);
        if pdptes {
            for encoding in (0x280a..=0x2810).step_by(2) {
                self.model.set(encoding, l2.get(encoding));
            }
        }
        self.asleep = 0;
        self.machine.leave(&self.hardware, report, &self.known, &self.memory);
        if !pdptes {
            self.adopt_page_directories();
        }
        let is_nmi = told.reason == 0 && told.interruption >> 8 & 7 == 2;
        self.goes_on(efer, cr0, ExitReason(told.reason as u16), is_nmi)?;
        self.compare()
    }

    /// L1's registers behind an exit.
    pub fn goes_on(&mut self, efer: u64, cr0: u64, reason: ExitReason, is_nmi: bool) -> Checked {
        let v = self.machine.vmcs12();
        let registers = host::registers(v, Kept { cr0, efer }, reason, is_nmi);
        same("L1's registers", registers, self.model.registers(cr0, efer, is_nmi))?;
        same("L1's segments", host::segments(v), self.model.segments())
    }
}
