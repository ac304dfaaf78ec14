//! The guest's code: its size, its bytes at RIP, what they decode to, and where the next instruction begins
//! on CPUs that do not tell. Inside the loop what is mapped is looked at, and nothing sleeps; outside it
//! the VMM's mapping is.

use backend::{Backend, SegmentName};
use cpuid::GuestCpuid;
use emulate::{CodeSize, DecodeCache, DecodeError, Decoded, Fetched, Stop};
use host::{KBox, NoMemory};
use mmu::fetch::CodeMode;
use mmu::{CodeFetch, PagingContext, Section, WalkError, translate, walk};
use x86::{Exception, Gpa, Gva, Rflags, cpuid::feature, segment::attr};

use crate::{
    Vcpu,
    run::outcome::{Break, Outcome},
};

/// What was learnt of the guest's code: where its pages lie, and what its bytes decode to.
pub(crate) struct Code {
    /// Walks to pages of code, remembered with the entries that they rest on.
    pub(crate) fetch: KBox<CodeFetch>,
    /// Decoded instructions by their bytes.
    pub(crate) decode: KBox<DecodeCache>,
}

impl Code {
    /// Nothing is known yet.
    #[inline(never)]
    pub(crate) fn new() -> Result<Self, NoMemory> {
        Ok(Self { fetch: crate::code_fetch()?, decode: crate::boxed(DecodeCache::new)? })
    }
}

/// What the registers say of the guest's code, and how that reaches memory.
pub(crate) trait CodeState: Backend {
    /// Whether the code segment is a 64-bit one: nearly always, and asked of less than the whole size.
    #[inline(always)]
    fn is_64bit_code(&self) -> bool {
        // EFER.LMA first: a segment of legacy mode may have the bit set, and it means nothing
        // there.
        self.efer().is_long() && self.code_attributes() & attr::L != 0
    }

    /// Operand and address size of the code segment.
    #[inline]
    fn code_size(&self) -> CodeSize {
        let cs = self.code_attributes();
        if self.efer().is_long() && cs & attr::L != 0 {
            CodeSize::Bits64
        } else if cs & attr::DB != 0 {
            // In real mode too: a segment stays what it was when CR0.PE is cleared.
            CodeSize::Bits32
        } else {
            CodeSize::Bits16
        }
    }

    /// Linear address of RIP.
    #[inline]
    fn linear_rip(&self) -> u64 {
        self.linear_rip_in(self.code_size())
    }

    /// Linear address of RIP in code of this size.
    #[inline(always)]
    fn linear_rip_in(&self, size: CodeSize) -> u64 {
        let rip = self.rip();
        match size {
            CodeSize::Bits64 => rip,
            // Linear addresses have 32 bits outside of 64-bit mode, and wrap there.
            _ => self.segment(SegmentName::Cs).base.wrapping_add(rip) & 0xffff_ffff,
        }
    }

    /// `rip` within the code segment's width.
    #[inline(always)]
    fn wrap_rip(&self, rip: u64) -> u64 {
        if self.is_64bit_code() { rip } else { rip & 0xffff_ffff }
    }

    /// What a fetch is translated by.
    #[inline(always)]
    fn code_mode(&self) -> CodeMode {
        let c = self.control();
        CodeMode { cr0: c.cr0, cr3: c.cr3, cr4: c.cr4, efer: c.efer, cpl: self.cpl() }
    }

    /// How the guest, which has this CPUID, addresses memory now.
    #[inline]
    fn paging_context(&self, cpuid: &GuestCpuid) -> PagingContext {
        let c = self.control();
        PagingContext {
            cr0: c.cr0,
            cr3: c.cr3,
            cr4: c.cr4,
            efer: c.efer,
            rflags_ac: self.rflags().contains(Rflags::AC),
            cpl: self.cpl(),
            pkru: self.pkru(),
            maxphyaddr: cpuid.maxphyaddr(),
            gbpages: cpuid.has(feature::GBPAGES),
            amd: cpuid.vendor().is_amd_like(),
        }
    }
}

impl<B: Backend> CodeState for B {}

impl<B: Backend> Vcpu<B> {
    /// The eight bytes at RIP, if the page they are in was fetched from before and they all lie in it.
    #[inline(always)]
    pub(crate) fn known_code(&self, s: Section<'_>, size: CodeSize) -> Option<u64> {
        let (rip, mode) = (self.b.linear_rip_in(size), self.b.code_mode());
        let view = self.mmu.memory.view(s);
        // Eight bytes are enough for nearly all instructions that exit; a longer one takes the cold
        // way.
        self.code.fetch.first_bytes(&mode, rip, &view)
    }

    /// Instruction bytes at RIP without sleeping: for the loop. `size`: the code segment's.
    #[inline]
    pub(crate) fn fetch_here(&mut self, s: Section<'_>, size: CodeSize) -> Option<([u8; 16], u8)> {
        let (rip, mode) = (self.b.linear_rip_in(size), self.b.code_mode());
        let view = self.mmu.memory.view(s);
        let code = match self.code.fetch.hit(&mode, rip, &view) {
            Some(code) => code,
            None => {
                // Through tables of L1's outside alone.
                if self.mmu.l1_tables().is_some() {
                    return None;
                }
                let context = self.b.paging_context(&self.cpuid);
                self.code.fetch.fetch(&context, rip, &view)?
            }
        };
        // An instruction has at most 15 bytes: the sixteenth is of the next one.
        Some((code.bytes, code.len.min(15) as u8))
    }

    /// RIP of the next instruction, by decoding what lies at RIP. Every exit of a CPU that does not tell
    /// comes here, and nearly all with code that was fetched before and an
    /// instruction of few bytes.
    #[inline(never)]
    pub(crate) fn decode_next_rip(&mut self, s: Section<'_>) -> Option<u64> {
        let size = self.b.code_size();
        if let Some(code) = self.known_code(s, size)
            && let Some(length) = emulate::common_length(code, size)
        {
            return Some(wrap(size, self.b.rip().wrapping_add(u64::from(length))));
        }
        self.decode_next_rip_of_any(s)
    }

    #[cold]
    #[inline(never)]
    fn decode_next_rip_of_any(&mut self, s: Section<'_>) -> Option<u64> {
        let size = self.b.code_size();
        let (bytes, len) = self.fetch_here(s, size)?;
        let length = emulate::length(bytes.get(..usize::from(len))?, size)?;
        Some(wrap(size, self.b.rip().wrapping_add(u64::from(length))))
    }

    /// The decoded instruction at RIP without sleeping.
    #[inline]
    pub(crate) fn decode_here(&mut self, s: Section<'_>) -> Option<Decoded> {
        let size = self.b.code_size();
        let assisted = self.b.insn_bytes();
        // Decode assists are the bytes that the CPU executed; what lies at RIP may be another instruction by now.
        let fetched = if assisted.is_empty() {
            let (bytes, len) = self.fetch_here(s, size)?;
            Fetched::new(bytes.get(..usize::from(len))?, size)
        } else {
            Fetched::new(assisted, size)
        };
        self.code.decode.get(fetched).ok()
    }
}

/// Outside the loop, where a page may have to be read through user space.
impl<B: Backend> Vcpu<B> {
    /// Reads the bytes at RIP through the guest's page tables, for who looks at bytes and not at an
    /// instruction; may sleep. The number of bytes: fewer than 15 when the next page cannot be fetched.
    pub(crate) fn read_code(&mut self, bytes: &mut [u8; 15]) -> Result<usize, Stop> {
        let (rip, mut done) = (self.b.linear_rip(), 0);
        while done < bytes.len() {
            let at = Gva(rip.wrapping_add(done as u64));
            let gpa = match self.translate(at, walk::Access::FETCH) {
                Ok(gpa) => gpa,
                Err(_) if done != 0 => {
                    // Nobody fetches it, if the instruction ends before.
                    self.mmu.forget_refusal();
                    break;
                }
                Err(stop) => return Err(stop),
            };
            let part = rest_in_page(bytes, done, gpa);
            if self.mmu.memory.read_in_page(gpa, part).is_err() {
                if done != 0 {
                    break;
                }
                return Err(Stop::Unsupported);
            }
            done += part.len();
        }
        Ok(done)
    }

    /// Decodes the instruction at RIP, read through the guest's page tables; may sleep. The page behind is
    /// looked at only if the instruction goes on there: a refusal of that page is the instruction's then.
    #[inline(never)]
    pub(crate) fn slow_decode(&mut self) -> Outcome<(Fetched, Decoded)> {
        let (size, rip) = (self.b.code_size(), self.b.linear_rip());
        let (mut bytes, mut len) = ([0; 15], 0);
        loop {
            // Page by page: a neighbour in linear addresses may lie anywhere in physical ones.
            let at = Gva(rip.wrapping_add(len as u64));
            let gpa = match self.translate(at, walk::Access::FETCH) {
                Ok(gpa) => gpa,
                Err(stop) => return Err(self.refuse_fetch(stop)),
            };
            let part = rest_in_page(&mut bytes, len, gpa);
            if self.mmu.memory.read_in_page(gpa, part).is_err() {
                // A page of code where no memory is: KVM_RUN has no exit by which a VMM could give
                // instruction bytes.
                return Err(self.emulation_failed());
            }
            len += part.len();
            let fetched = Fetched::new(bytes.get(..len).unwrap_or(&[]), size);
            match self.code.decode.get(fetched) {
                Ok(decoded) => return Ok((fetched, decoded)),
                Err(DecodeError::Truncated) if len < bytes.len() => {}
                // More than 15 bytes are #GP on every CPU.
                Err(DecodeError::TooLong) => {
                    self.raise(Exception::gp(0));
                    return Err(Break::ToGuest);
                }
                Err(DecodeError::Truncated | DecodeError::Invalid) => {
                    return Err(self.emulation_failed());
                }
            }
        }
    }

    /// The page of an instruction cannot be fetched.
    #[cold]
    fn refuse_fetch(&mut self, stop: Stop) -> Break {
        match stop {
            Stop::Fault(exception) => {
                self.raise(exception);
                Break::ToGuest
            }
            // L1's tables: its run ends with that.
            Stop::Retry => Break::ToGuest,
            Stop::NeedUser | Stop::Unsupported => self.emulation_failed(),
        }
    }

    /// RIP of the next instruction, by reading through user space where need be.
    pub(crate) fn slow_next_rip(&mut self) -> Outcome<u64> {
        // SVM tells of instructions that are intercepted as such alone: of one that switches tasks it tells 0 (APM vol. 2
        // §15.7.1).
        if let Some(rip) = self.b.next_rip()
            && rip != 0
        {
            return Ok(rip);
        }
        let (_, decoded) = self.slow_decode()?;
        Ok(self.b.wrap_rip(self.b.rip().wrapping_add(u64::from(decoded.len()))))
    }

    pub(crate) fn translate(&mut self, at: Gva, access: walk::Access) -> Result<Gpa, Stop> {
        if let Some(tables) = self.mmu.l1_tables() {
            return self.translate_of_l2(&tables, at, access);
        }
        let context = self.b.paging_context(&self.cpuid);
        match translate(&*self.mmu.memory, &context, at.0, access) {
            Ok(t) => Ok(t.gpa),
            Err(WalkError::Fault(e)) => Err(Stop::Fault(e)),
            Err(WalkError::NonCanonical) => Err(Stop::Fault(Exception::gp(0))),
            Err(WalkError::Memory { .. }) => Err(Stop::Unsupported),
        }
    }
}

/// What of `bytes` is behind the first `done` and comes from the page of `gpa`.
fn rest_in_page(bytes: &mut [u8; 15], done: usize, gpa: Gpa) -> &mut [u8] {
    let room = bytes.len().saturating_sub(done).min(4096 - gpa.page_offset());
    bytes.get_mut(done..).and_then(|rest| rest.get_mut(..room)).unwrap_or(&mut [])
}

/// `rip` within the width of a code segment.
#[inline(always)]
pub(crate) fn wrap(size: CodeSize, rip: u64) -> u64 {
    match size {
        CodeSize::Bits64 => rip,
        _ => rip & 0xffff_ffff,
    }
}
