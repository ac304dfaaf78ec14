//! A Linux kernel and its initrd in guest memory, by the 64-bit boot protocol
//! (Documentation/arch/x86/boot.rst): the same for an ELF `vmlinux` and a `bzImage`.

use std::fs::File;
use std::io::{Read, Seek};
use std::path::Path;

use anyhow::{Context, Result, bail};
use guest_machine::long_mode::Tables;
use guest_machine::{descriptors, page_tables};
use linux_loader::configurator::linux::LinuxBootConfigurator;
use linux_loader::configurator::{BootConfigurator, BootParams};
use linux_loader::loader::bootparam::{boot_e820_entry, boot_params, setup_header};
use linux_loader::loader::{BzImage, Elf, KernelLoader, KernelLoaderResult};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

use super::mp_table;
use crate::vmm::memory::{self, Backing, GuestMemory, PAGE};

const GDT: u64 = 0x500;
/// Where the boot parameters lie; RSI at entry.
pub const BOOT_PARAMETERS: u64 = 0x7000;
const ROOT: u64 = 0x9000;
/// The stack at entry, which Linux soon leaves.
pub const STACK_TOP: u64 = 0x8ff0;
const COMMAND_LINE: u64 = 0x2_0000;
const COMMAND_LINE_BYTES: usize = 4096;
const HIGH_MEMORY: u64 = 0x10_0000;

/// Guest-physical addresses from here to 4 GiB belong to devices.
const DEVICE_HOLE: u64 = 0xc000_0000;
const FOUR_GIB: u64 = 1 << 32;
const MIB: u64 = 1 << 20;

const BOOT_FLAG: u16 = 0xaa55;
const HEADER_MAGIC: u32 = 0x5372_6448; // "HdrS"
const UNDEFINED_LOADER: u8 = 0xff;
/// `xloadflags`: the kernel has a 64-bit entry, 0x200 bytes into its protected-mode part.
const HAS_64_BIT_ENTRY: u16 = 1;
const BZIMAGE_ENTRY_OFFSET: u64 = 0x200;

const E820_RAM: u32 = 1;
const E820_RESERVED: u32 = 2;

/// Where in a bzImage its magic lies.
const BZIMAGE_MAGIC_OFFSET: usize = 0x202;

/// What the guest is made of.
#[derive(Clone, Copy, Debug)]
pub struct Image<'a> {
    pub kernel: &'a Path,
    pub initrd: &'a Path,
    pub command_line: &'a str,
    pub cpus: u32,
}

/// Memory of `mib` MiB, around the devices' hole below 4 GiB.
pub fn map_memory(mib: u64) -> Result<GuestMemory> {
    let bytes = mib.checked_mul(MIB).context("that is more memory than there can be")?;
    let low = bytes.min(DEVICE_HOLE);
    let mut ranges = vec![(GuestAddress(0), low as usize)];
    if bytes > low {
        ranges.push((GuestAddress(FOUR_GIB), (bytes - low) as usize));
    }
    memory::map(&ranges, Backing::Default)
}

/// Loads everything. Returns the entry point.
pub fn load(memory: &GuestMemory, image: Image<'_>) -> Result<u64> {
    let (loaded, entry) = load_kernel(memory, image.kernel)?;
    let mut header = loaded.setup_header.unwrap_or_default();
    let (initrd, size) = load_initrd(memory, image.initrd, loaded.kernel_end, &header)?;
    write_command_line(memory, image.command_line)?;
    header.boot_flag = BOOT_FLAG;
    header.header = HEADER_MAGIC;
    header.type_of_loader = UNDEFINED_LOADER;
    header.cmd_line_ptr = COMMAND_LINE as u32;
    header.cmdline_size = image.command_line.len() as u32;
    header.ramdisk_image = initrd as u32;
    header.ramdisk_size = size as u32;
    if header.kernel_alignment == 0 {
        header.kernel_alignment = 0x100_0000;
    }
    write_boot_parameters(memory, header)?;
    page_tables::write_identity_map(memory, ROOT, page_tables::TABLE)?;
    descriptors::write_gdt(memory, GDT, 0)?;
    mp_table::write(memory, image.cpus)?;
    Ok(entry)
}

/// Where the tables for the entry in 64-bit mode lie.
pub fn tables() -> Tables {
    Tables { root: ROOT, gdt: GDT, idt: None, task: 0 }
}

fn load_kernel(memory: &GuestMemory, path: &Path) -> Result<(KernelLoaderResult, u64)> {
    let name = path.display();
    let mut file = File::open(path).with_context(|| format!("cannot open the kernel {name}"))?;
    let mut head = Vec::new();
    file.by_ref()
        .take(BZIMAGE_MAGIC_OFFSET as u64 + 4)
        .read_to_end(&mut head)
        .and_then(|_| file.rewind())
        .with_context(|| format!("cannot read the kernel {name}"))?;
    let high = Some(GuestAddress(HIGH_MEMORY));
    if head.starts_with(b"\x7fELF") {
        let loaded = Elf::load(memory, None, &mut file, high)
            .with_context(|| format!("cannot load the ELF kernel {name}: is the memory enough?"))?;
        Ok((loaded, loaded.kernel_load.0))
    } else if head.get(BZIMAGE_MAGIC_OFFSET..) == Some(b"HdrS") {
        let loaded = BzImage::load(memory, None, &mut file, high)
            .with_context(|| format!("cannot load the bzImage {name}: is the memory enough?"))?;
        let flags = loaded.setup_header.map_or(0, |header| header.xloadflags);
        if flags & HAS_64_BIT_ENTRY == 0 {
            bail!("the bzImage {name} has no 64-bit entry");
        }
        Ok((loaded, loaded.kernel_load.0 + BZIMAGE_ENTRY_OFFSET))
    } else {
        bail!("{name} is neither an ELF vmlinux nor a bzImage");
    }
}

/// Puts the initrd at the top of low memory, out of the kernel's way.
fn load_initrd(
    memory: &GuestMemory,
    path: &Path,
    kernel_end: u64,
    header: &setup_header,
) -> Result<(u64, u64)> {
    let name = path.display();
    let mut file = File::open(path).with_context(|| format!("cannot open the initrd {name}"))?;
    let size = file.metadata().with_context(|| format!("cannot read the initrd {name}"))?.len();
    let limit = match header.initrd_addr_max {
        0 => u64::from(u32::MAX),
        max => u64::from(max),
    };
    let top = low_memory_end(memory).min(limit + 1);
    // A bzImage unpacks itself behind where it lies; the header says how much room it needs.
    let busy = kernel_end.max(header.pref_address.saturating_add(u64::from(header.init_size)));
    let start = top.checked_sub(size).map_or(0, |start| start & !(PAGE - 1));
    if start < busy {
        bail!("the initrd {name} of {} MiB does not fit: give the guest more memory", size / MIB);
    }
    memory
        .read_exact_volatile_from(GuestAddress(start), &mut file, size as usize)
        .with_context(|| format!("cannot read the initrd {name}"))?;
    Ok((start, size))
}

fn low_memory_end(memory: &GuestMemory) -> u64 {
    memory.iter().next().map_or(0, |region| region.len())
}

fn write_command_line(memory: &GuestMemory, command_line: &str) -> Result<()> {
    if command_line.len() >= COMMAND_LINE_BYTES {
        bail!("the kernel command line is longer than {} bytes", COMMAND_LINE_BYTES - 1);
    }
    if command_line.contains('\0') {
        bail!("the kernel command line contains a NUL");
    }
    let mut bytes = command_line.as_bytes().to_vec();
    bytes.push(0);
    memory
        .write_slice(&bytes, GuestAddress(COMMAND_LINE))
        .context("no guest memory for the command line")
}

fn write_boot_parameters(memory: &GuestMemory, header: setup_header) -> Result<()> {
    let mut parameters = boot_params { hdr: header, ..Default::default() };
    let map = memory_map(memory);
    for (entry, &value) in parameters.e820_table.iter_mut().zip(&map) {
        *entry = value;
    }
    parameters.e820_entries = map.len() as u8;
    let parameters = BootParams::new(&parameters, GuestAddress(BOOT_PARAMETERS));
    LinuxBootConfigurator::write_bootparams(&parameters, memory)
        .context("no guest memory for the boot parameters")
}

/// RAM, but for what holds the MP table and the hole above it.
fn memory_map(memory: &GuestMemory) -> Vec<boot_e820_entry> {
    let entry = |start: u64, end: u64, kind| boot_e820_entry {
        addr: start,
        size: end - start,
        r#type: kind,
    };
    let mut map = vec![
        entry(0, mp_table::ADDRESS, E820_RAM),
        entry(mp_table::ADDRESS, HIGH_MEMORY, E820_RESERVED),
        entry(HIGH_MEMORY, low_memory_end(memory).max(HIGH_MEMORY), E820_RAM),
    ];
    map.extend(memory.iter().skip(1).map(|region| {
        let start = region.start_addr().0;
        entry(start, start + region.len(), E820_RAM)
    }));
    map
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_beyond_the_hole_lies_above_four_gib() {
        let memory = map_memory(4096).unwrap();
        let map: Vec<_> =
            memory_map(&memory).iter().map(|e| (e.addr, e.addr + e.size, e.r#type)).collect();
        assert_eq!(
            map,
            [
                (0, 0x9_fc00, E820_RAM),
                (0x9_fc00, 0x10_0000, E820_RESERVED),
                (0x10_0000, DEVICE_HOLE, E820_RAM),
                (FOUR_GIB, FOUR_GIB + (1 << 30), E820_RAM),
            ]
        );
    }

    #[test]
    fn a_file_that_is_no_kernel_is_refused_by_name() {
        let memory = map_memory(16).unwrap();
        let error = load_kernel(&memory, Path::new("/proc/self/cmdline")).unwrap_err();
        assert!(error.to_string().contains("neither an ELF vmlinux nor a bzImage"));
        let error = load_kernel(&memory, Path::new("/nonexistent")).unwrap_err();
        assert!(format!("{error:#}").contains("No such file"));
    }

    #[test]
    fn an_initrd_that_does_not_fit_is_refused() {
        let memory = map_memory(2).unwrap();
        let exe = std::env::current_exe().unwrap();
        let error = load_initrd(&memory, &exe, HIGH_MEMORY, &setup_header::default()).unwrap_err();
        assert!(error.to_string().contains("does not fit"));
    }

    #[test]
    fn a_command_line_ends_with_nul_and_has_a_limit() {
        let memory = map_memory(2).unwrap();
        write_command_line(&memory, "quiet").unwrap();
        let mut bytes = [0xff; 6];
        memory.read_slice(&mut bytes, GuestAddress(COMMAND_LINE)).unwrap();
        assert_eq!(&bytes, b"quiet\0");
        assert!(write_command_line(&memory, &"x".repeat(COMMAND_LINE_BYTES)).is_err());
    }
}
