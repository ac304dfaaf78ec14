//! What an entry makes of L2's registers (SDM vol. 3C §27.3.2), and what an exit leaves: the information (§28.2), L2's state (§28.3)
//! and the state with which L1 goes on (§28.5).

use x86::{DescriptorTable, Segment};

use gannet_nested_vmx::leave::host::{Registers, Segments};

use super::Wrong;
use super::exits::Exit;
use super::fields::{self, Fields};
use super::reference::Model;

/// L1's own registers, which L2 has where an entry does not load them.
pub const DR7: u64 = 0x401;
pub const DEBUGCTL: u64 = 0;
pub const PAT: u64 = 0x0007_0406_0007_0406;
const EFER: u64 = 0xd01;

fn bit(word: u64, number: u32) -> bool {
    word >> number & 1 != 0
}

/// L2's registers behind the entry.
pub fn entered(model: &Model) -> Fields {
    let v = &model.now().fields;
    let mut l2 = v.clone();
    let controls = v.get(0x4012);
    if !bit(controls, 2) {
        l2.set(0x681a, DR7);
        l2.set(0x2802, DEBUGCTL);
    }
    if !bit(controls, 14) {
        l2.set(0x2804, PAT);
    }
    if !bit(controls, 15) {
        let (long, paging) = (bit(controls, 9), bit(v.get(0x6800), 31));
        // "LMA is loaded with the setting of the IA-32e mode guest control. If CR0.PG is 1 LME is, too; otherwise it is unmodified."
        let lme = if paging { long } else { bit(EFER, 8) };
        let lme = if long { true } else { lme };
        l2.set(0x2806, EFER & !0x500 | u64::from(long) << 10 | u64::from(lme) << 8);
    }
    l2
}

/// What L1 is told.
#[derive(Clone, Copy, Debug, Default)]
pub struct Told {
    pub reason: u64,
    pub qualification: u64,
    /// Valid, or 0.
    pub interruption: u64,
    pub error_code: u64,
    pub vectoring: u64,
    pub vectoring_error: u64,
    pub length: u64,
    pub information: u64,
    pub linear: Option<u64>,
    pub physical: Option<u64>,
}

/// Reasons for which the qualification means something (§28.2.1): of all others it is cleared.
pub fn is_qualified(reason: u64) -> bool {
    let descriptors = matches!(reason, 46 | 47);
    let vmx = matches!(reason, 19 | 21..=23 | 25 | 27 | 50 | 53);
    let pages = matches!(reason, 44 | 45 | 48 | 56 | 62);
    let others = matches!(reason, 0 | 4 | 9 | 14 | 28..=30 | 36 | 58 | 63 | 64);
    descriptors || vmx || pages || others
}

/// Exits that come within the delivery of an event, among others (§28.2.4).
pub fn is_in_delivery(reason: u64) -> bool {
    matches!(reason, 0 | 9 | 44 | 48 | 49 | 62)
}

/// Exits with instruction information (§28.2.5): of port accesses INS and OUTS (table 28-8), which are strings.
fn is_informed(x: &Exit) -> bool {
    if x.reason == 30 && !bit(x.qualification, 4) {
        return false;
    }
    matches!(
        x.reason,
        19 | 21..=23 | 25 | 27 | 30 | 46 | 47 | 50 | 53 | 57 | 58 | 61 | 63 | 64 | 67 | 68
    )
}

impl Told {
    /// The exit as the hardware has it.
    pub fn of(x: &Exit, model: &Model) -> Self {
        let qualified = is_qualified(x.reason) || model.is(Wrong::Qualification);
        let event = x.reason == 0;
        let delivers = is_in_delivery(x.reason) && bit(x.vectoring, 31);
        let linear = match x.reason {
            48 => bit(x.qualification, 7),
            30 => bit(x.qualification, 4),
            28 => x.qualification >> 4 & 3 == 3 && bit(x.qualification, 6),
            _ => false,
        };
        Self {
            reason: x.reason,
            qualification: if qualified { x.qualification } else { 0 },
            interruption: if event { x.interruption } else { 0 },
            error_code: x.error_code,
            vectoring: if delivers { x.vectoring } else { 0 },
            vectoring_error: x.vectoring_error,
            length: x.length,
            information: if is_informed(x) { x.information } else { 0 },
            linear: linear.then_some(x.linear),
            physical: matches!(x.reason, 48 | 49).then_some(x.physical),
        }
    }

    /// An exit that only L0 knows of.
    pub fn plain(reason: u64, qualification: u64) -> Self {
        Self { reason, qualification, ..Self::default() }
    }
}

impl Model {
    /// L2 exits to L1.
    pub fn left(&mut self, told: &Told, activity: u64, timer: u64) {
        let l2 = self.l2.take().unwrap();
        self.save(&l2, activity, timer);
        self.set(0x4402, told.reason);
        self.set(0x6400, told.qualification);
        self.set(0x4404, told.interruption);
        // Bit 11: there is an error code. Of what has no meaning nothing of the host's is to be seen: it stays as it was.
        if bit(told.interruption, 11) {
            self.set(0x4406, told.error_code);
        }
        self.set(0x4408, told.vectoring);
        if bit(told.vectoring, 11) || self.is(Wrong::VectoringError) {
            self.set(0x440a, told.vectoring_error);
        }
        self.set(0x440c, told.length);
        self.set(0x440e, told.information);
        if let Some(linear) = told.linear {
            self.set(0x640a, linear);
        }
        if let Some(physical) = told.physical {
            self.set(0x2400, physical);
        }
        // "The valid bit is cleared on every VM exit."
        self.set(0x4016, self.get(0x4016) & 0x7fff_ffff);
    }

    /// §28.3.
    fn save(&mut self, l2: &Fields, activity: u64, timer: u64) {
        let exit = self.get(0x400c);
        for encoding in fields::all().filter(|encoding| fields::is_guest(*encoding)) {
            let saved = match encoding {
                // DR7 and DEBUGCTL, PAT, EFER.
                0x681a | 0x2802 => bit(exit, 2),
                0x2804 => bit(exit, 18),
                0x2806 => bit(exit, 20) || self.is(Wrong::SavesEfer),
                // The link pointer, PERF_GLOBAL_CTRL, BNDCFGS, the interrupt status, the index of the log.
                0x2800 | 0x2808 | 0x2812 | 0x0810 | 0x0812 => false,
                // PDPTEs: by whoever compares.
                0x280a..=0x2810 => false,
                // The activity state, and the timer.
                0x4826 | 0x482e => false,
                _ => true,
            };
            if saved {
                self.set(encoding, l2.get(encoding));
            }
        }
        self.set(0x4826, activity);
        if bit(exit, 22) {
            self.set(0x482e, timer);
        }
        // "IA-32e mode guest" becomes EFER.LMA (§28.2, IA32_VMX_MISC bit 5).
        let lma = bit(l2.get(0x2806), 10);
        if !self.is(Wrong::ModeControl) {
            self.set(0x4012, self.get(0x4012) & !(1 << 9) | u64::from(lma) << 9);
        }
    }

    /// §28.5.1, from L2's CR0 and EFER.
    pub fn registers(&self, l2_cr0: u64, l2_efer: u64, is_nmi: bool) -> Registers {
        let v = &self.now().fields;
        let exit = v.get(0x400c);
        let long = bit(exit, 9);
        // ET, NW and CD stay, and what no processor has: bits 28:19, 17, 15:6, which are 0.
        let kept = 1 << 4 | 1 << 29 | 1 << 30;
        let mut cr4 = v.get(0x6c04);
        if long {
            cr4 |= 1 << 5;
        } else {
            cr4 &= !(1 << 17);
        }
        let efer = match (bit(exit, 21), long) {
            (true, _) => v.get(0x2c02),
            (false, true) if !self.is(Wrong::HostMode) => l2_efer | 0x500,
            (false, true) => l2_efer,
            (false, false) => l2_efer & !0x500,
        };
        let loads = |number, field| bit(exit, number).then(|| v.get(field));
        Registers {
            cr0: v.get(0x6c00) & !kept & !super::CR0_RESERVED | l2_cr0 & kept,
            cr3: v.get(0x6c02),
            cr4,
            efer,
            rip: v.get(0x6c16),
            rsp: v.get(0x6c14),
            rflags: 2,
            dr7: 0x400,
            debugctl: 0,
            pat: loads(19, 0x2c00),
            perf_global_ctrl: loads(12, 0x2c04),
            loads_pdptes: !long && bit(cr4, 5),
            blocks_nmis: is_nmi,
        }
    }

    /// §28.5.2 and §28.5.3.
    pub fn segments(&self) -> Segments {
        let v = &self.now().fields;
        let long = bit(v.get(0x400c), 9);
        // Type 3, S, DPL 0, P, D and G; unusable with a null selector.
        let data = |selector: u16, base: u64| {
            let selector = v.get(selector) as u16;
            let attr = if selector == 0 { 0 } else { 0xc93 };
            Segment { base, limit: u32::MAX, selector, attr }
        };
        let based = |field| if self.is(Wrong::HostBases) { 0 } else { v.get(field) };
        // Type 11, S, P and G; L or D.
        let code = 0x89b | if long { 0x200 } else { 0x400 };
        Segments {
            es: data(0x0c00, 0),
            cs: Segment { base: 0, limit: u32::MAX, selector: v.get(0x0c02) as u16, attr: code },
            ss: data(0x0c04, 0),
            ds: data(0x0c06, 0),
            fs: data(0x0c08, based(0x6c06)),
            gs: data(0x0c0a, based(0x6c08)),
            // A busy TSS, P.
            tr: Segment {
                base: v.get(0x6c0a),
                limit: 0x67,
                selector: v.get(0x0c0c) as u16,
                attr: 0x8b,
            },
            ldtr: Segment::default(),
            gdtr: DescriptorTable { base: v.get(0x6c0c), limit: 0xffff },
            idtr: DescriptorTable { base: v.get(0x6c0e), limit: 0xffff },
        }
    }
}
