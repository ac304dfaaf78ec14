//! A vCPU for tests: flat RAM, a device whose accesses all go to "user space" through a replay
//! log, pages that fault, and ports. It asserts what the emulator promises of its accesses.
#![allow(dead_code)]

use std::ops::Range;

use gannet_emulate::{
    Access, CodeSize, Completion, Decoded, Machine, Outcome, PortAccess, STRING_RUN_BYTES, SegReg,
    Segment, Stop, Table, decode, emulate,
};
use x86::{Cr0, Cr4, Exception, Gva, Rflags, exception::pf, segment::DescriptorTable};

pub const RAX: usize = 0;
pub const RCX: usize = 1;
pub const RDX: usize = 2;
pub const RBX: usize = 3;
pub const RSP: usize = 4;
pub const RBP: usize = 5;
pub const RSI: usize = 6;
pub const RDI: usize = 7;

pub const DATA: u16 = 0x93;
pub const CODE: u16 = 0x9b;
pub const BIG: u16 = 1 << 10;

/// Where the processor's own tables lie, for its own accesses alone: first the GDT, then the TSS.
pub const SYSTEM: u64 = 0x7000_0000;
pub const GDT_LIMIT: u16 = 0xfff;
pub const TSS: u64 = SYSTEM + 0x1000;
/// Bytes of it, and the busy 32-bit or 64-bit TSS that TR holds at first; it allows no port.
pub const SYSTEM_BYTES: usize = 0x5000;
pub const TSS_LIMIT: u32 = 0x67;

/// One access that left for user space.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    MmioRead(u64, usize),
    MmioWrite(u64, Vec<u8>),
    In(u16, u8, usize),
    Out(u16, u8, Vec<u8>),
}

#[derive(Clone, Debug)]
pub struct TestMachine {
    pub gpr: [u64; 16],
    pub xmm: [u128; 16],
    pub rip: u64,
    pub rflags: u64,
    pub size: CodeSize,
    pub cpl: u8,
    pub cr0: u64,
    pub cr4: u64,
    /// The six, then LDTR and TR.
    pub segments: [Segment; 8],
    pub long_mode: bool,
    pub gdtr: DescriptorTable,
    pub idtr: DescriptorTable,
    pub system: Vec<u8>,
    /// The processor's own accesses here get #PF.
    pub system_absent: Range<u64>,
    pub mm: [u64; 8],
    /// An MMX register was looked at: the x87 unit is in MMX's state.
    pub mmx_used: bool,
    /// The x87 unit's control and status words.
    pub x87: [u16; 2],
    pub cr3: u64,
    /// Linear address of `ram[0]`.
    pub base: u64,
    pub ram: Vec<u8>,
    /// Accesses here go to user space.
    pub mmio: Range<u64>,
    /// Accesses here get #PF.
    pub absent: Range<u64>,
    /// Writes here get #PF.
    pub read_only: Range<u64>,
    /// Whether ports leave for user space, as MMIO does.
    pub ports_in_user_space: bool,
    pub runs_allowed: bool,
    /// The port says that elements wait, however many were read.
    pub items_wait: bool,
    /// What the device answers next; counts up.
    pub device_value: u64,
    pub events: Vec<Event>,
    pub commits: usize,
    /// Translations flushed: type and PCID of an INVPCID, and the address.
    pub flushed: Vec<(Option<(u8, u16)>, u64)>,
    /// The next so many cmpxchg lose a race.
    pub lost_races: usize,
    log: Vec<(Event, Vec<u8>)>,
    cursor: usize,
    pending: Option<Event>,
}

impl TestMachine {
    /// In real mode, about to execute what lies at 0x100.
    pub fn real(base: u64, ram: usize) -> Self {
        let mut m = Self::new(CodeSize::Bits16, base, ram);
        (m.cr0, m.rip) = (0, 0x100);
        for segment in &mut m.segments {
            *segment = Segment { selector: 0, base: 0, limit: 0xffff, ..*segment };
        }
        m
    }

    pub fn new(size: CodeSize, base: u64, ram: usize) -> Self {
        let flat = |attributes| Segment { selector: 0x10, attributes, limit: u32::MAX, base: 0 };
        let big = if size == CodeSize::Bits16 { 0 } else { BIG };
        let mut segments = [flat(DATA | big); 8];
        segments[SegReg::Cs as usize] = flat(CODE | big);
        let mut system = vec![0; SYSTEM_BYTES];
        // The bitmap of ports begins beyond the limit.
        system[0x1000 + 102..0x1000 + 104].fill(0xff);
        segments[SegReg::Ldtr as usize] = Segment::default();
        segments[SegReg::Tr as usize] =
            Segment { selector: 0x40, attributes: 0x8b, limit: TSS_LIMIT, base: TSS };
        Self {
            gpr: [0; 16],
            xmm: [0; 16],
            rip: 0x40_0000,
            rflags: 2,
            size,
            cpl: 0,
            cr0: 1,
            cr4: 1 << 9,
            segments,
            long_mode: size == CodeSize::Bits64,
            gdtr: DescriptorTable { base: SYSTEM, limit: GDT_LIMIT },
            idtr: DescriptorTable::default(),
            system,
            system_absent: 0..0,
            mm: [0; 8],
            mmx_used: false,
            x87: [0; 2],
            cr3: 0,
            base,
            ram: vec![0; ram],
            mmio: 0..0,
            absent: 0..0,
            read_only: 0..0,
            ports_in_user_space: true,
            runs_allowed: true,
            items_wait: false,
            device_value: 0x1122_3344_5566_7788,
            events: Vec::new(),
            commits: 0,
            flushed: Vec::new(),
            lost_races: 0,
            log: Vec::new(),
            cursor: 0,
            pending: None,
        }
    }

    /// A 64-bit machine with two pages of RAM at 0x1000 and a device at 0x8000.
    pub fn long() -> Self {
        let mut m = Self::new(CodeSize::Bits64, 0x1000, 0x2000);
        m.mmio = 0x8000..0x9000;
        m
    }

    pub fn decoded(&self, code: &[u8]) -> Decoded {
        let decoded = decode(code, self.size).expect("the test's bytes decode");
        assert_eq!(usize::from(decoded.len()), code.len(), "the test's bytes are one instruction");
        decoded
    }

    /// Emulates once; user space answers nothing.
    pub fn once(&mut self, code: &[u8]) -> Result<Completion, Stop> {
        self.cursor = 0;
        let decoded = self.decoded(code);
        emulate(self, &decoded)
    }

    /// One call of the emulator in a row of replays; completes the instruction if it can.
    pub fn step(&mut self, code: &[u8]) -> Result<Outcome, Stop> {
        let done = self.once(code)?;
        self.end(done);
        Ok(done.outcome)
    }

    /// Before a call of the emulator: the replay log is read from its start.
    pub fn start(&mut self) {
        self.cursor = 0;
    }

    /// Commits what a call completed.
    pub fn end(&mut self, done: Completion) {
        assert_eq!(self.cursor, self.log.len(), "the replay log was not used up");
        self.log.clear();
        self.rip = done.rip;
        self.rflags = done.rflags.bits();
    }

    /// Emulates with user space answering until something else than `NeedUser` comes out; commits
    /// RIP and RFLAGS.
    pub fn run(&mut self, code: &[u8]) -> Result<Completion, Stop> {
        let decoded = self.decoded(code);
        loop {
            self.cursor = 0;
            match emulate(self, &decoded) {
                Err(Stop::NeedUser) => self.user_space(),
                Ok(done) => {
                    self.end(done);
                    return Ok(done);
                }
                Err(stop) => {
                    self.log.clear();
                    return Err(stop);
                }
            }
        }
    }

    /// Answers the pending access, as a VMM would after KVM_EXIT_MMIO or KVM_EXIT_IO.
    pub fn user_space(&mut self) {
        let event = self.pending.take().expect("NeedUser without a pending access");
        let answer = match &event {
            Event::MmioRead(_, len) => self.answer(*len),
            Event::In(_, _, len) => self.answer(*len),
            _ => Vec::new(),
        };
        self.events.push(event.clone());
        self.log.push((event, answer));
    }

    fn answer(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        while bytes.len() < len {
            bytes.extend_from_slice(&self.device_value.to_le_bytes());
            self.device_value = self.device_value.wrapping_add(0x0101_0101_0101_0101);
        }
        bytes.truncate(len);
        bytes
    }

    fn ask(&mut self, event: Event) -> Result<Vec<u8>, Stop> {
        assert!(self.pending.is_none(), "an access after NeedUser");
        match self.log.get(self.cursor) {
            Some((known, answer)) => {
                assert_eq!(*known, event, "the replay asks differently");
                self.cursor += 1;
                Ok(answer.clone())
            }
            None => {
                self.pending = Some(event);
                Err(Stop::NeedUser)
            }
        }
    }

    fn check(&self, at: u64, len: usize, max: usize, write: bool) -> Result<(), Stop> {
        assert!(len >= 1 && len <= max, "an access of {len} bytes");
        assert!((at & 0xfff) as usize + len <= 0x1000, "an access across a page at {at:#x}");
        if self.absent.contains(&at) || self.read_only.contains(&at) {
            let code = if write { pf::WRITE } else { 0 };
            return Err(Stop::Fault(Exception::pf(at, code)));
        }
        Ok(())
    }

    fn device(&self, at: u64) -> bool {
        // An end of u64::MAX stands for one more.
        self.mmio.contains(&at) || at == u64::MAX && self.mmio.end == at
    }

    fn index(&self, at: u64) -> usize {
        let index = at.wrapping_sub(self.base);
        assert!(index < self.ram.len() as u64, "an access outside of RAM at {at:#x}");
        index as usize
    }

    pub fn bytes(&self, at: u64, len: usize) -> &[u8] {
        let index = self.index(at);
        &self.ram[index..index + len]
    }

    pub fn set_bytes(&mut self, at: u64, data: &[u8]) {
        let index = self.index(at);
        self.ram[index..index + data.len()].copy_from_slice(data);
    }

    pub fn u64_at(&self, at: u64) -> u64 {
        u64::from_le_bytes(self.bytes(at, 8).try_into().unwrap())
    }

    fn system_at(&mut self, at: u64, len: usize, write: bool) -> Result<&mut [u8], Stop> {
        assert!((at & 0xfff) as usize + len <= 0x1000, "an access across a page at {at:#x}");
        let index = at.wrapping_sub(SYSTEM) as usize;
        if self.system_absent.contains(&at) || index + len > self.system.len() {
            let code = if write { pf::WRITE } else { 0 };
            return Err(Stop::Fault(Exception::pf(at, code)));
        }
        Ok(&mut self.system[index..index + len])
    }

    /// A descriptor of the GDT.
    pub fn set_descriptor(&mut self, selector: u16, raw: u64) {
        let at = usize::from(selector & !7);
        self.system[at..at + 8].copy_from_slice(&raw.to_le_bytes());
    }

    pub fn descriptor(&self, selector: u16) -> u64 {
        let at = usize::from(selector & !7);
        u64::from_le_bytes(self.system[at..at + 8].try_into().unwrap())
    }

    pub fn longest(&self) -> usize {
        if self.runs_allowed { STRING_RUN_BYTES } else { 8 }
    }
}

impl Machine for TestMachine {
    fn gpr(&self, index: usize) -> u64 {
        self.gpr[index]
    }
    fn set_gpr(&mut self, index: usize, value: u64) {
        self.gpr[index] = value;
    }
    fn rip(&self) -> u64 {
        self.rip
    }
    fn rflags(&self) -> Rflags {
        Rflags::from_bits_retain(self.rflags)
    }
    fn segment(&self, segment: SegReg) -> Segment {
        self.segments[segment as usize]
    }
    fn code_size(&self) -> CodeSize {
        self.size
    }
    fn cpl(&self) -> u8 {
        self.cpl
    }
    fn cr0(&self) -> Cr0 {
        Cr0::from_bits_retain(self.cr0)
    }
    fn cr4(&self) -> Cr4 {
        Cr4::from_bits_retain(self.cr4)
    }
    fn read(&mut self, at: Gva, into: &mut [u8], how: Access) -> Result<(), Stop> {
        assert_ne!(how, Access::Store);
        self.check(at.0, into.len(), self.longest(), how == Access::Modify)?;
        if self.device(at.0) {
            assert!(into.len() <= 8);
            let answer = self.ask(Event::MmioRead(at.0, into.len()))?;
            into.copy_from_slice(&answer);
        } else {
            into.copy_from_slice(self.bytes(at.0, into.len()));
        }
        Ok(())
    }
    fn write(&mut self, at: Gva, data: &[u8], how: Access) -> Result<(), Stop> {
        assert_ne!(how, Access::Load);
        self.check(at.0, data.len(), self.longest(), true)?;
        if self.device(at.0) {
            assert!(data.len() <= 8);
            self.ask(Event::MmioWrite(at.0, data.to_vec()))?;
        } else {
            self.set_bytes(at.0, data);
        }
        Ok(())
    }
    fn probe_write(&mut self, at: Gva, len: usize) -> Result<(), Stop> {
        self.check(at.0, len, self.longest().max(16), true)
    }
    fn cmpxchg(&mut self, at: Gva, old: &[u8], new: &[u8]) -> Result<bool, Stop> {
        assert_eq!(old.len(), new.len());
        self.check(at.0, old.len(), 16, true)?;
        if self.device(at.0) {
            self.ask(Event::MmioWrite(at.0, new.to_vec()))?;
            return Ok(true);
        }
        if self.lost_races > 0 {
            self.lost_races -= 1;
            let index = self.index(at.0);
            self.ram[index] = self.ram[index].wrapping_add(1);
            return Ok(false);
        }
        if self.bytes(at.0, old.len()) != old {
            return Ok(false);
        }
        self.set_bytes(at.0, new);
        Ok(true)
    }
    fn is_writable_ram(&mut self, at: Gva, len: usize) -> Result<bool, Stop> {
        let end = at.0 + (len as u64 - 1);
        let barred =
            |at: u64| self.device(at) || self.absent.contains(&at) || self.read_only.contains(&at);
        Ok(self.runs_allowed && !barred(at.0) && !barred(end))
    }
    fn port_run(&mut self, access: &PortAccess, at: Gva, elements: u64) -> Result<u64, Stop> {
        let len = elements as usize * usize::from(access.size());
        Ok(if self.is_writable_ram(at, len)? { elements } else { 1 })
    }
    fn has_port_items(&self) -> bool {
        self.items_wait
    }
    fn commit(&mut self) {
        assert_eq!(self.cursor, self.log.len(), "a commit before the replay log was used up");
        self.log.clear();
        self.cursor = 0;
        self.commits += 1;
    }
    fn long_mode(&self) -> bool {
        self.long_mode
    }
    fn table(&self, table: Table) -> DescriptorTable {
        match table {
            Table::Global => self.gdtr,
            Table::Interrupt => self.idtr,
        }
    }
    fn set_table(&mut self, table: Table, value: DescriptorTable) {
        match table {
            Table::Global => self.gdtr = value,
            Table::Interrupt => self.idtr = value,
        }
    }
    fn set_segment(&mut self, segment: SegReg, value: Segment) {
        self.segments[segment as usize] = value;
        if segment == SegReg::Ss && self.cr0 & 1 != 0 {
            self.cpl = (value.attributes >> 5 & 3) as u8;
        }
    }
    fn read_system(&mut self, at: Gva, into: &mut [u8]) -> Result<(), Stop> {
        into.copy_from_slice(self.system_at(at.0, into.len(), false)?);
        Ok(())
    }
    fn write_system(&mut self, at: Gva, data: &[u8]) -> Result<(), Stop> {
        self.system_at(at.0, data.len(), true)?.copy_from_slice(data);
        Ok(())
    }
    fn probe_system(&mut self, at: Gva) -> Result<(), Stop> {
        self.system_at(at.0, 1, true).map(|_| ())
    }
    fn port_in(&mut self, access: &PortAccess, into: &mut [u8]) -> Result<(), Stop> {
        let (port, size) = (access.port(), access.size());
        assert_eq!(into.len() % usize::from(size), 0);
        let event = Event::In(port, size, into.len());
        let answer = if self.ports_in_user_space {
            self.ask(event)?
        } else {
            self.events.push(event);
            self.answer(into.len())
        };
        into.copy_from_slice(&answer);
        Ok(())
    }
    fn port_out(&mut self, access: &PortAccess, data: &[u8]) -> Result<(), Stop> {
        let (port, size) = (access.port(), access.size());
        assert_eq!(data.len() % usize::from(size), 0);
        let event = Event::Out(port, size, data.to_vec());
        if self.ports_in_user_space {
            self.ask(event)?;
        } else {
            self.events.push(event);
        }
        Ok(())
    }
    fn read_cr(&mut self, n: u8) -> Result<u64, Stop> {
        match n {
            0 => Ok(self.cr0),
            4 => Ok(self.cr4),
            _ => Err(Stop::Unsupported),
        }
    }
    fn write_cr(&mut self, n: u8, value: u64) -> Result<(), Stop> {
        match n {
            0 => self.cr0 = value,
            3 => self.cr3 = value,
            4 => self.cr4 = value,
            _ => return Err(Stop::Unsupported),
        }
        Ok(())
    }
    fn invlpg(&mut self, at: Gva) -> Result<(), Stop> {
        self.flushed.push((None, at.0));
        Ok(())
    }
    fn invpcid(&mut self, kind: u8, pcid: u16, at: Gva) -> Result<(), Stop> {
        self.flushed.push((Some((kind, pcid)), at.0));
        Ok(())
    }
    fn x87_words(&mut self) -> Result<[u16; 2], Stop> {
        Ok(self.x87)
    }
    fn x87_init(&mut self) -> Result<(), Stop> {
        self.x87 = [0x37f, 0];
        Ok(())
    }
    fn mm(&mut self, n: u8) -> Result<u64, Stop> {
        self.mmx_used = true;
        Ok(self.mm[usize::from(n)])
    }
    fn set_mm(&mut self, n: u8, value: u64) -> Result<(), Stop> {
        self.mm[usize::from(n)] = value;
        Ok(())
    }
    fn xmm(&mut self, n: u8) -> Result<u128, Stop> {
        Ok(self.xmm[usize::from(n)])
    }
    fn set_xmm(&mut self, n: u8, value: u128) -> Result<(), Stop> {
        self.xmm[usize::from(n)] = value;
        Ok(())
    }
}
