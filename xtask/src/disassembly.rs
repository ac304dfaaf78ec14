//! A kernel module taken apart: its executable sections decoded, with the symbol behind each relocation, and the site tables that
//! objtool wrote. What [`crate::check`] judges.

use anyhow::{Context, Result};
use iced_x86::{Decoder, DecoderOptions, FlowControl, Instruction, Mnemonic, OpKind, Register};
use object::elf;
use object::read::elf::{ElfFile64, FileHeader};
use object::{Object, ObjectSection, ObjectSymbol, RelocationTarget, SectionIndex, SymbolKind};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// A place in the module: section number and offset.
pub type Place = (usize, u64);

/// One relocation.
pub struct Relocation {
    /// The ELF type, such as `R_X86_64_PLT32`.
    pub kind: u32,
    /// The symbol's name, or its section's.
    pub symbol: String,
    /// The section that is patched.
    pub section: String,
}

/// One decoded instruction.
pub struct Line {
    pub place: Place,
    pub instruction: Instruction,
    /// The symbol that a relocation inside the instruction names.
    pub symbol: Option<String>,
    /// Index into [`Image::functions`], of the function it lies in.
    pub function: Option<usize>,
}

/// A kernel module's file, taken apart.
pub struct Image {
    pub relocations: Vec<Relocation>,
    pub lines: Vec<Line>,
    /// Names, in the order of their place.
    pub functions: Vec<String>,
    pub undefined: BTreeSet<String>,
    /// Places of `jmp __x86_return_thunk` that the kernel may patch.
    pub return_sites: BTreeSet<Place>,
    /// Places of calls and jumps to an indirect thunk that the kernel may patch.
    pub retpoline_sites: BTreeSet<Place>,
    /// Names of the executable sections, by number.
    pub sections: BTreeMap<usize, String>,
    /// Bytes in executable sections.
    pub text_bytes: u64,
    /// `vermagic`, `license`, `parm`, … as `key=value`.
    pub modinfo: Vec<String>,
}

impl Image {
    /// Reads and decodes a module.
    pub fn read(path: &Path) -> Result<Self> {
        let data = std::fs::read(path).with_context(|| format!("reading {}", path.display()))?;
        let file = ElfFile64::<object::Endianness>::parse(&*data)
            .with_context(|| format!("{} is no 64-bit ELF file", path.display()))?;
        let mut image = Image {
            relocations: Vec::new(),
            lines: Vec::new(),
            functions: Vec::new(),
            undefined: BTreeSet::new(),
            return_sites: sites(&file, ".return_sites"),
            retpoline_sites: sites(&file, ".retpoline_sites"),
            sections: BTreeMap::new(),
            text_bytes: 0,
            modinfo: Vec::new(),
        };
        for symbol in file.symbols() {
            let name = symbol.name().unwrap_or_default();
            if symbol.is_undefined() && !name.is_empty() {
                image.undefined.insert(name.to_owned());
            }
        }
        if let Some(section) = file.section_by_name(".modinfo") {
            let strings = section.data()?.split(|b| *b == 0).filter(|s| !s.is_empty());
            image.modinfo = strings.map(|s| String::from_utf8_lossy(s).into_owned()).collect();
        }
        for section in file.sections() {
            let object::SectionFlags::Elf { sh_flags } = section.flags() else { continue };
            if sh_flags & u64::from(elf::SHF_ALLOC) == 0 {
                continue;
            }
            let name = section.name().unwrap_or("?").to_owned();
            let mut symbols = BTreeMap::new();
            for (offset, relocation) in section.relocations() {
                let symbol = target_name(&file, relocation.target());
                let object::RelocationFlags::Elf { r_type } = relocation.flags() else { continue };
                symbols.insert(offset, symbol.clone());
                let section = name.clone();
                image.relocations.push(Relocation { kind: r_type, symbol, section });
            }
            if sh_flags & u64::from(elf::SHF_EXECINSTR) != 0 {
                image.text_bytes += section.size();
                image.sections.insert(section.index().0, name);
                image.decode(&file, &section, &symbols)?;
            }
        }
        Ok(image)
    }

    fn decode<'d, H: FileHeader>(
        &mut self,
        file: &object::read::elf::ElfFile<'d, H>,
        section: &object::read::elf::ElfSection<'d, '_, H>,
        symbols: &BTreeMap<u64, String>,
    ) -> Result<()> {
        let number = section.index().0;
        // Offset to function, for those that start in this section.
        let mut starts = BTreeMap::new();
        for symbol in file.symbols() {
            if symbol.kind() == SymbolKind::Text && symbol.section_index() == Some(section.index())
            {
                let name = rustc_demangle::demangle(symbol.name().unwrap_or("?"));
                let name = format!("{name:#}");
                starts.entry(symbol.address()).or_insert(name);
            }
        }
        let mut decoder = Decoder::with_ip(64, section.data()?, 0, DecoderOptions::NONE);
        let mut function = None;
        while decoder.can_decode() {
            let instruction = decoder.decode();
            let (from, to) = (instruction.ip(), instruction.next_ip());
            if let Some(name) = starts.get(&from) {
                function = Some(self.functions.len());
                self.functions.push(name.clone());
            }
            let symbol = symbols.range(from..to).next().map(|(_, name)| name.clone());
            self.lines.push(Line { place: (number, from), instruction, symbol, function });
        }
        Ok(())
    }

    /// The name of the function a line lies in.
    pub fn function(&self, line: &Line) -> Option<&str> {
        line.function.and_then(|i| self.functions.get(i)).map(String::as_str)
    }

    /// Every function that has code, with its section.
    pub fn functions_of(&self) -> impl Iterator<Item = (&str, &str)> {
        let mut last = None;
        self.lines.iter().filter_map(move |line| {
            let new = line.function.is_some()
                && core::mem::replace(&mut last, line.function) != line.function;
            let section = self.sections.get(&line.place.0)?;
            new.then(|| self.function(line).map(|name| (name, section.as_str()))).flatten()
        })
    }

    /// The function a line lies in, and the offset in its section.
    pub fn locate(&self, line: &Line) -> String {
        let name = line.function.and_then(|i| self.functions.get(i));
        format!("{} (section {} + {:#x})", name.map_or("?", |n| n), line.place.0, line.place.1)
    }
}

impl Line {
    /// Whether it touches x87, MMX, SSE, AVX or mask registers.
    pub fn touches_vector_or_x87(&self) -> bool {
        let registers = (0..self.instruction.op_count())
            .filter(|i| self.instruction.op_kind(*i) == OpKind::Register)
            .map(|i| self.instruction.op_register(i));
        let vector = |r: Register| {
            r.is_vector_register() || r.is_mm() || r.is_st() || r.is_k() || r.is_tmm()
        };
        let x87 = |f: &iced_x86::CpuidFeature| format!("{f:?}").starts_with("FPU");
        registers.into_iter().any(vector) || self.instruction.cpuid_features().iter().any(x87)
    }

    /// Whether it is a plain return.
    pub fn is_return(&self) -> bool {
        self.instruction.flow_control() == FlowControl::Return
            && !matches!(self.instruction.mnemonic(), Mnemonic::Iret | Mnemonic::Iretq)
    }

    /// Whether it branches to where a register or memory says.
    pub fn is_indirect_branch(&self) -> bool {
        let flow = self.instruction.flow_control();
        matches!(flow, FlowControl::IndirectBranch | FlowControl::IndirectCall)
    }

    /// Whether it calls or jumps to a symbol whose name starts so.
    pub fn branches_to(&self, prefix: &str) -> bool {
        let flow = self.instruction.flow_control();
        let branch = matches!(
            flow,
            FlowControl::Call | FlowControl::UnconditionalBranch | FlowControl::ConditionalBranch
        );
        branch && self.symbol.as_deref().is_some_and(|s| s.starts_with(prefix))
    }

    /// By how many bytes it lowers the stack pointer, pushes apart.
    pub fn lowers_stack_by(&self) -> u64 {
        let i = &self.instruction;
        if i.op_count() < 2 || i.op0_kind() != OpKind::Register || i.op0_register() != Register::RSP
        {
            return 0;
        }
        let immediate = |i: &Instruction| match i.op1_kind() {
            OpKind::Immediate8to64 | OpKind::Immediate32to64 | OpKind::Immediate64 => {
                Some(i.immediate(1) as i64)
            }
            _ => None,
        };
        let by = match i.mnemonic() {
            Mnemonic::Sub => immediate(i),
            Mnemonic::Add => immediate(i).and_then(i64::checked_neg),
            Mnemonic::Lea if i.memory_base() == Register::RSP => {
                (i.memory_displacement64() as i64).checked_neg()
            }
            _ => None,
        };
        by.and_then(|by| u64::try_from(by).ok()).unwrap_or(0)
    }
}

fn target_name<'d, H: FileHeader>(
    file: &object::read::elf::ElfFile<'d, H>,
    target: RelocationTarget,
) -> String {
    let RelocationTarget::Symbol(index) = target else { return "?".to_owned() };
    let Ok(symbol) = file.symbol_by_index(index) else { return "?".to_owned() };
    match symbol.name() {
        Ok(name) if !name.is_empty() => name.to_owned(),
        _ => symbol
            .section_index()
            .and_then(|i| file.section_by_index(i).ok())
            .and_then(|s| s.name().ok().map(str::to_owned))
            .unwrap_or_else(|| "?".to_owned()),
    }
}

/// The places that a site table names: each entry is a 32-bit distance from itself to an instruction, so its relocation's symbol and
/// addend are the instruction's place.
fn sites<'d, H: FileHeader>(
    file: &object::read::elf::ElfFile<'d, H>,
    table: &str,
) -> BTreeSet<Place> {
    let Some(section) = file.section_by_name(table) else { return BTreeSet::new() };
    let place = |(_, relocation): (u64, object::Relocation)| {
        let RelocationTarget::Symbol(index) = relocation.target() else { return None };
        let symbol = file.symbol_by_index(index).ok()?;
        let SectionIndex(number) = symbol.section_index()?;
        Some((number, symbol.address().wrapping_add_signed(relocation.addend())))
    };
    section.relocations().filter_map(place).collect()
}
