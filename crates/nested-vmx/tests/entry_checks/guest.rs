//! What the manual says of the guest's state: SDM vol. 3C §27.3.1.

use x86::vmcs::field;

use super::oracle::{Entry, failed, is_pat};

pub fn judge(e: &mut Entry<'_>) {
    control_registers(e);
    msrs(e);
    segments(e);
    descriptor_tables(e);
    flow(e);
    activity(e);
    interruptibility(e);
    pending_debug(e);
    link(e);
    page_directories(e);
}

fn bit(word: u64, number: u32) -> bool {
    word >> number & 1 != 0
}

/// §27.3.1.1, control and debug registers.
fn control_registers(e: &mut Entry<'_>) {
    let c = e.processor.capabilities;
    let (cr0, cr4) = (e.get(field::GUEST_CR0), e.get(field::GUEST_CR4));
    // CD and NW are never checked, PE and PG are not for an unrestricted guest.
    let mut never = 1 << 29 | 1 << 30;
    if e.unrestricted() {
        never |= 1 | 1 << 31;
    }
    let good = c.cr0_fixed0 & !cr0 & !never == 0 && cr0 & !c.cr0_fixed1 & !never == 0;
    e.guest(good, "", "27.3.1.1 CR0");
    e.guest(!bit(cr0, 31) || bit(cr0, 0), "", "27.3.1.1 CR0.PG needs PE");
    let good = c.cr4_fixed0 & !cr4 == 0 && cr4 & !c.cr4_fixed1 == 0;
    e.guest(good, "", "27.3.1.1 CR4");
    if e.entry(2) {
        let good = e.get(field::GUEST_DEBUGCTL) & !e.processor.limits.debugctl == 0;
        e.guest(good, "", "27.3.1.1 DEBUGCTL");
        let good = e.get(field::GUEST_DR7) & e.processor.dr7_zeros == 0;
        e.guest(good, "", "27.3.1.1 DR7");
    }
    if e.ia32e() {
        e.guest(bit(cr0, 31), "CR0.PG", "27.3.1.1 IA-32e mode");
        e.guest(bit(cr4, 5), "CR4.PAE", "27.3.1.1 IA-32e mode");
    } else {
        e.guest(!bit(cr4, 17), "", "27.3.1.1 CR4.PCIDE");
    }
    e.guest(e.is_physical(e.get(field::GUEST_CR3)), "", "27.3.1.1 CR3");
}

/// §27.3.1.1, MSRs.
fn msrs(e: &mut Entry<'_>) {
    let limits = e.processor.limits;
    e.guest(e.is_canonical(e.get(field::GUEST_SYSENTER_ESP)), "ESP", "27.3.1.1 SYSENTER");
    e.guest(e.is_canonical(e.get(field::GUEST_SYSENTER_EIP)), "EIP", "27.3.1.1 SYSENTER");
    let counters = e.get(field::GUEST_PERF_GLOBAL_CTRL);
    let good = !e.entry(13) || counters & !limits.perf_global_ctrl == 0;
    e.guest(good, "", "27.3.1.1 PERF_GLOBAL_CTRL");
    e.guest(!e.entry(14) || is_pat(e.get(field::GUEST_PAT)), "", "27.3.1.1 PAT");
    if e.entry(15) {
        let efer = e.get(field::GUEST_EFER);
        e.guest(efer & !limits.efer == 0, "", "27.3.1.1 EFER: reserved bits");
        e.guest(bit(efer, 10) == e.ia32e(), "", "27.3.1.1 EFER.LMA");
        let paging = bit(e.get(field::GUEST_CR0), 31);
        let good = !paging || bit(efer, 10) == bit(efer, 8);
        e.guest(good, "", "27.3.1.1 EFER.LME");
    }
}

#[derive(Clone, Copy)]
struct Segment {
    name: &'static str,
    selector: u64,
    base: u64,
    limit: u64,
    rights: u64,
}

impl Segment {
    fn usable(&self) -> bool {
        !bit(self.rights, 16)
    }

    fn kind(&self) -> u64 {
        self.rights & 15
    }

    fn dpl(&self) -> u64 {
        self.rights >> 5 & 3
    }

    fn rpl(&self) -> u64 {
        self.selector & 3
    }

    /// Bit 15: what the limit allows it to be.
    fn is_granularity_right(&self) -> bool {
        let (small, large) = (self.limit & 0xfff != 0xfff, self.limit >> 20 != 0);
        if bit(self.rights, 15) { !small } else { !large }
    }
}

macro_rules! segment {
    ($e:expr, $name:literal, $selector:ident, $base:ident, $limit:ident, $rights:ident) => {
        Segment {
            name: $name,
            selector: $e.get(field::$selector),
            base: $e.get(field::$base),
            limit: $e.get(field::$limit),
            rights: $e.get(field::$rights),
        }
    };
}

/// §27.3.1.2.
#[rustfmt::skip] // A table.
fn segments(e: &mut Entry<'_>) {
    let cs = segment!(e, "CS", GUEST_CS_SELECTOR, GUEST_CS_BASE, GUEST_CS_LIMIT, GUEST_CS_RIGHTS);
    let ss = segment!(e, "SS", GUEST_SS_SELECTOR, GUEST_SS_BASE, GUEST_SS_LIMIT, GUEST_SS_RIGHTS);
    let ds = segment!(e, "DS", GUEST_DS_SELECTOR, GUEST_DS_BASE, GUEST_DS_LIMIT, GUEST_DS_RIGHTS);
    let es = segment!(e, "ES", GUEST_ES_SELECTOR, GUEST_ES_BASE, GUEST_ES_LIMIT, GUEST_ES_RIGHTS);
    let fs = segment!(e, "FS", GUEST_FS_SELECTOR, GUEST_FS_BASE, GUEST_FS_LIMIT, GUEST_FS_RIGHTS);
    let gs = segment!(e, "GS", GUEST_GS_SELECTOR, GUEST_GS_BASE, GUEST_GS_LIMIT, GUEST_GS_RIGHTS);
    let vm86 = bit(e.get(field::GUEST_RFLAGS), 17);
    if !vm86 && !e.unrestricted() {
        e.guest(ss.rpl() == cs.rpl(), "", "27.3.1.2 SS.RPL and CS.RPL");
    }
    for register in [cs, ss, ds, es, fs, gs] {
        base(e, &register);
        if vm86 {
            let good = register.base == register.selector << 4;
            e.guest(good, register.name, "27.3.1.2 base in virtual-8086 mode");
            e.guest(register.limit == 0xffff, register.name, "27.3.1.2 limit in virtual-8086 mode");
            e.guest(register.rights == 0xf3, register.name, "27.3.1.2 rights in virtual-8086 mode");
        } else {
            rights(e, &register, &cs, &ss);
        }
    }
    task_register(e);
    local_table(e);
}

fn base(e: &mut Entry<'_>, register: &Segment) {
    let name = register.name;
    let good = match name {
        "FS" | "GS" => e.is_canonical(register.base),
        "CS" => register.base >> 32 == 0,
        _ => !register.usable() || register.base >> 32 == 0,
    };
    e.guest(good, name, "27.3.1.2 base");
}

/// The access rights of CS, SS, DS, ES, FS and GS outside of virtual-8086 mode.
fn rights(e: &mut Entry<'_>, register: &Segment, cs: &Segment, ss: &Segment) {
    let (name, kind) = (register.name, register.kind());
    let unrestricted = e.unrestricted();
    let counts = name == "CS" || register.usable();
    let protected = bit(e.get(field::GUEST_CR0), 0);
    match name {
        "CS" => {
            let good = matches!(kind, 9 | 11 | 13 | 15) || kind == 3 && unrestricted;
            e.guest(good, name, "27.3.1.2 type");
            let good = match kind {
                3 => register.dpl() == 0,
                9 | 11 => register.dpl() == ss.dpl(),
                13 | 15 => register.dpl() <= ss.dpl(),
                _ => true,
            };
            e.guest(good, name, "27.3.1.2 DPL");
            let wide = e.ia32e() && bit(register.rights, 13);
            e.guest(!(wide && bit(register.rights, 14)), name, "27.3.1.2 D and L");
        }
        "SS" => {
            e.guest(!counts || matches!(kind, 3 | 7), name, "27.3.1.2 type");
            // Whether or not it is usable: its DPL is the CPL.
            let good = unrestricted || register.dpl() == register.rpl();
            e.guest(good, name, "27.3.1.2 DPL and RPL");
            let good = register.dpl() == 0 || cs.kind() != 3 && protected;
            e.guest(good, name, "27.3.1.2 DPL");
        }
        _ => {
            let good = bit(kind, 0) && (!bit(kind, 3) || bit(kind, 1));
            e.guest(!counts || good, name, "27.3.1.2 type");
            let good = unrestricted || !counts || kind > 11 || register.dpl() >= register.rpl();
            e.guest(good, name, "27.3.1.2 DPL and RPL");
        }
    }
    if counts {
        e.guest(bit(register.rights, 4), name, "27.3.1.2 S");
        e.guest(bit(register.rights, 7), name, "27.3.1.2 P");
        e.guest(register.rights >> 8 & 15 == 0, name, "27.3.1.2 reserved bits 11:8");
        e.guest(register.is_granularity_right(), name, "27.3.1.2 G");
        e.guest(register.rights >> 17 == 0, name, "27.3.1.2 reserved bits 31:17");
    }
}

#[rustfmt::skip] // A table.
fn task_register(e: &mut Entry<'_>) {
    let tr = segment!(e, "TR", GUEST_TR_SELECTOR, GUEST_TR_BASE, GUEST_TR_LIMIT, GUEST_TR_RIGHTS);
    e.guest(!bit(tr.selector, 2), tr.name, "27.3.1.2 TI");
    e.guest(e.is_canonical(tr.base), tr.name, "27.3.1.2 base");
    let good = tr.kind() == 11 || tr.kind() == 3 && !e.ia32e();
    e.guest(good, tr.name, "27.3.1.2 type");
    e.guest(tr.usable(), tr.name, "27.3.1.2 usable");
    system(e, &tr);
}

#[rustfmt::skip] // A table.
fn local_table(e: &mut Entry<'_>) {
    let ldtr =
        segment!(e, "LDTR", GUEST_LDTR_SELECTOR, GUEST_LDTR_BASE, GUEST_LDTR_LIMIT, GUEST_LDTR_RIGHTS);
    if ldtr.usable() {
        e.guest(!bit(ldtr.selector, 2), ldtr.name, "27.3.1.2 TI");
        e.guest(e.is_canonical(ldtr.base), ldtr.name, "27.3.1.2 base");
        e.guest(ldtr.kind() == 2, ldtr.name, "27.3.1.2 type");
        system(e, &ldtr);
    }
}

/// What the rights of TR and LDTR have in common.
fn system(e: &mut Entry<'_>, register: &Segment) {
    let name = register.name;
    e.guest(!bit(register.rights, 4), name, "27.3.1.2 S");
    e.guest(bit(register.rights, 7), name, "27.3.1.2 P");
    e.guest(register.rights >> 8 & 15 == 0, name, "27.3.1.2 reserved bits 11:8");
    e.guest(register.is_granularity_right(), name, "27.3.1.2 G");
    e.guest(register.rights >> 17 == 0, name, "27.3.1.2 reserved bits 31:17");
}

/// §27.3.1.3.
fn descriptor_tables(e: &mut Entry<'_>) {
    e.guest(e.is_canonical(e.get(field::GUEST_GDTR_BASE)), "GDTR", "27.3.1.3 base");
    e.guest(e.is_canonical(e.get(field::GUEST_IDTR_BASE)), "IDTR", "27.3.1.3 base");
    e.guest(e.get(field::GUEST_GDTR_LIMIT) >> 16 == 0, "GDTR", "27.3.1.3 limit");
    e.guest(e.get(field::GUEST_IDTR_LIMIT) >> 16 == 0, "IDTR", "27.3.1.3 limit");
}

/// §27.3.1.4.
fn flow(e: &mut Entry<'_>) {
    let (rip, rflags) = (e.get(field::GUEST_RIP), e.get(field::GUEST_RFLAGS));
    if e.ia32e() && bit(e.get(field::GUEST_CS_RIGHTS), 13) {
        // "Bits 63:N must be identical": one bit less than a canonical address asks for, so that a guest whose last instruction
        // ends where the lower half does can be entered.
        let above = rip >> e.processor.limits.linear_bits;
        let ones = u64::MAX >> e.processor.limits.linear_bits;
        e.guest(above == 0 || above == ones, "", "27.3.1.4 RIP: bits 63:N");
    } else {
        e.guest(rip >> 32 == 0, "", "27.3.1.4 RIP: bits 63:32");
    }
    let zeros = rflags >> 22 == 0 && !bit(rflags, 15) && !bit(rflags, 5) && !bit(rflags, 3);
    e.guest(zeros && bit(rflags, 1), "", "27.3.1.4 RFLAGS: reserved bits");
    let real = !bit(e.get(field::GUEST_CR0), 0);
    e.guest(!bit(rflags, 17) || !(e.ia32e() || real), "", "27.3.1.4 RFLAGS.VM");
    let external = matches!(e.injected(), Some((0, _)));
    e.guest(!external || bit(rflags, 9), "", "27.3.1.4 RFLAGS.IF");
}

/// §27.3.1.5, activity state.
fn activity(e: &mut Entry<'_>) {
    let state = e.get(field::GUEST_ACTIVITY);
    // IA32_VMX_MISC tells of HLT, shutdown and wait-for-SIPI in bits 6 to 8.
    let supported = match state {
        0 => true,
        1..=3 => bit(e.processor.capabilities.misc, 5 + state as u32),
        _ => false,
    };
    e.guest(supported, "", "27.3.1.5 activity: supported");
    let dpl = e.get(field::GUEST_SS_RIGHTS) >> 5 & 3;
    e.guest(state != 1 || dpl == 0, "", "27.3.1.5 activity: HLT at a CPL above 0");
    let blocked = e.get(field::GUEST_INTERRUPTIBILITY) & 3 != 0;
    e.guest(state == 0 || !blocked, "", "27.3.1.5 activity: blocking by STI or MOV SS");
    let wakes = match (state, e.injected()) {
        (_, None) | (0, _) => true,
        (1, Some((kind, vector))) => {
            kind == 0 || kind == 2 || kind == 3 && matches!(vector, 1 | 18) || kind == 7
        }
        (2, Some((kind, vector))) => kind == 2 || kind == 3 && vector == 18,
        (_, Some(_)) => false,
    };
    e.guest(wakes || state > 3, "", "27.3.1.5 activity: event");
    e.guest(!(state == 3 && e.entry(10)), "", "27.3.1.5 activity: SMM");
}

/// §27.3.1.5, interruptibility state.
fn interruptibility(e: &mut Entry<'_>) {
    let state = e.get(field::GUEST_INTERRUPTIBILITY);
    let (sti, mov_ss) = (bit(state, 0), bit(state, 1));
    let (external, nmi) =
        (matches!(e.injected(), Some((0, _))), matches!(e.injected(), Some((2, _))));
    e.guest(state >> 5 == 0, "", "27.3.1.5 interruptibility: reserved bits");
    e.guest(!(sti && mov_ss), "", "27.3.1.5 interruptibility: STI and MOV SS");
    let enabled = bit(e.get(field::GUEST_RFLAGS), 9);
    e.guest(!sti || enabled, "", "27.3.1.5 interruptibility: STI without IF");
    e.guest(!(external && (sti || mov_ss)), "", "27.3.1.5 interruptibility: external interrupt");
    e.guest(!(nmi && mov_ss), "", "27.3.1.5 interruptibility: NMI and MOV SS");
    let smm = e.processor.limits.smm;
    e.guest(!bit(state, 2) || smm, "", "27.3.1.5 interruptibility: SMI");
    e.guest(bit(state, 2) || !e.entry(10), "", "27.3.1.5 interruptibility: SMI and entry to SMM");
    // "A processor may require bit 0 (blocking by STI) to be 0" with an NMI, and tells it by a qualification of 3. "Other processors
    // may not make this requirement": this is one of those, as stock KVM's is.
    let blocked = e.pin(5) && bit(state, 3);
    e.guest(!(nmi && blocked), "", "27.3.1.5 interruptibility: NMI and virtual NMIs");
    // The processor has no SGX: no leaf of its CPUID says so.
    e.guest(!bit(state, 4), "", "27.3.1.5 interruptibility: enclave");
}

/// §27.3.1.5, pending debug exceptions.
fn pending_debug(e: &mut Entry<'_>) {
    let pending = e.get(field::GUEST_PENDING_DEBUG);
    let zeros = pending & 0xff0 == 0 && !bit(pending, 13) && !bit(pending, 15);
    e.guest(zeros && pending >> 17 == 0, "", "27.3.1.5 pending debug: reserved bits");
    let interruptibility = e.get(field::GUEST_INTERRUPTIBILITY);
    if interruptibility & 3 != 0 || e.get(field::GUEST_ACTIVITY) == 1 {
        let flag = bit(e.get(field::GUEST_RFLAGS), 8);
        let branches = bit(e.get(field::GUEST_DEBUGCTL), 1);
        // With TF and BTF the manual wants BS to be 0. L2 runs without BTF (docs/limits.md), and what its exit leaves can be
        // entered again: either is taken.
        let either = flag && branches;
        e.guest(either || bit(pending, 14) == flag, "", "27.3.1.5 pending debug: BS");
    }
    // The processor has no RTM, as it has no SGX.
    e.guest(!bit(pending, 16), "", "27.3.1.5 pending debug: RTM");
}

/// §27.3.1.5, VMCS link pointer.
fn link(e: &mut Entry<'_>) {
    let pointer = e.get(field::VMCS_LINK);
    if pointer == u64::MAX {
        return;
    }
    e.must(pointer & 0xfff == 0, failed(4), "", "27.3.1.5 link: alignment");
    e.must(e.is_physical(pointer), failed(4), "", "27.3.1.5 link: width");
    if pointer & 0xfff == 0 && e.is_physical(pointer) {
        let mut bytes = [0; 4];
        e.processor.memory.bytes(pointer, &mut bytes);
        let word = u32::from_le_bytes(bytes);
        let revision = e.processor.capabilities.basic.0 as u32 & 0x7fff_ffff;
        e.must(word & 0x7fff_ffff == revision, failed(4), "", "27.3.1.5 link: revision");
        let shadow = word >> 31 != 0;
        e.must(shadow == e.secondary(14), failed(4), "", "27.3.1.5 link: shadow VMCS");
    }
    // Entry to SMM is not offered, and nobody here is in SMM.
    e.must(pointer != e.processor.current, failed(4), "", "27.3.1.5 link: current VMCS");
}

/// §27.3.1.6.
fn page_directories(e: &mut Entry<'_>) {
    let (cr0, cr4) = (e.get(field::GUEST_CR0), e.get(field::GUEST_CR4));
    if !bit(cr0, 31) || !bit(cr4, 5) || e.ia32e() {
        return;
    }
    let entries = if e.secondary(1) {
        [field::GUEST_PDPTE0, field::GUEST_PDPTE1, field::GUEST_PDPTE2, field::GUEST_PDPTE3]
            .map(|pdpte| e.get(pdpte))
    } else {
        // CR3's bits 63:32 are ignored in PAE paging (SDM vol. 3A table 4-7).
        let table = e.get(field::GUEST_CR3) & 0xffff_ffe0;
        [0, 8, 16, 24].map(|at| {
            let mut bytes = [0; 8];
            e.processor.memory.bytes(table + at, &mut bytes);
            u64::from_le_bytes(bytes)
        })
    };
    for (of, entry) in ["0", "1", "2", "3"].into_iter().zip(entries) {
        // SDM vol. 3A table 4-8: bits 2:1, 8:5 and those beyond the width are reserved in an entry that is present.
        let reserved = entry & 0x1e6 != 0 || !e.is_physical(entry);
        e.must(!bit(entry, 0) || !reserved, failed(2), of, "27.3.1.6 PDPTE");
    }
}
