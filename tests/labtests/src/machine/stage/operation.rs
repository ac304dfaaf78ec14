//! What a stage's guest can be told to do, and what it says that came of it.

/// What to do. The numbers are known to `server.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
enum Code {
    End = 0,
    Read = 1,
    Write = 2,
    Fetch = 3,
    Add = 4,
    UserRead = 5,
    UserWrite = 6,
    UserFetch = 7,
    UserAdd = 8,
    Cr0 = 9,
    Cr3 = 10,
    Cr4 = 11,
    Efer = 12,
    Invlpg = 13,
    Cpuid = 14,
    Mark = 15,
    Write64 = 16,
    Await = 17,
    Send = 18,
    Copy = 19,
    Fill = 20,
    WriteByte = 21,
    Cr4OfPae = 22,
}

/// RFLAGS.AC: the kernel may touch user pages in spite of SMAP.
const AC: u64 = 1 << 18;
/// RFLAGS.IF.
const IF: u64 = 1 << 9;

/// One operation of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operation {
    code: Code,
    address: u64,
    value: u64,
    flags: u64,
}

const fn operation(code: Code, address: u64, value: u64) -> Operation {
    Operation { code, address, value, flags: 2 }
}

/// The list ends here.
pub const END: Operation = operation(Code::End, 0, 0);
/// The VMM takes over, and then the list goes on.
pub const MARK: Operation = operation(Code::Mark, 0, 0);
/// CPUID: an exit that the kernel serves.
pub const CPUID: Operation = operation(Code::Cpuid, 0, 0);

/// Reads a word.
pub fn read(address: u64) -> Operation {
    operation(Code::Read, address, 0)
}

/// Writes a word.
pub fn write(address: u64, value: u64) -> Operation {
    operation(Code::Write, address, value)
}

/// Calls what is there; the value is what it returns.
pub fn fetch(address: u64) -> Operation {
    operation(Code::Fetch, address, 0)
}

/// Adds to a word, locked; the value is what was there before.
pub fn add(address: u64, value: u64) -> Operation {
    operation(Code::Add, address, value)
}

/// Writes 8 bytes at once; in 32-bit modes by CMPXCHG8B, as kernels write PAE entries.
pub fn write64(address: u64, value: u64) -> Operation {
    operation(Code::Write64, address, value)
}

/// MOV to CR0.
pub fn cr0(value: u64) -> Operation {
    operation(Code::Cr0, 0, value)
}

/// MOV to CR3.
pub fn cr3(value: u64) -> Operation {
    operation(Code::Cr3, 0, value)
}

/// MOV to CR4.
pub fn cr4(value: u64) -> Operation {
    operation(Code::Cr4, 0, value)
}

/// MOV to CR4 after the accessed bits of the four entries at this root have been cleared.
pub fn cr4_of_pae(value: u64, root: u64) -> Operation {
    operation(Code::Cr4OfPae, root, value)
}

/// WRMSR of EFER.
pub fn efer(value: u64) -> Operation {
    operation(Code::Efer, 0, value)
}

/// INVLPG.
pub fn invlpg(address: u64) -> Operation {
    operation(Code::Invlpg, address, 0)
}

/// Waits, with interrupts enabled, until a word has this value.
pub fn wait(address: u64, value: u64) -> Operation {
    Operation { flags: 2 | IF, ..operation(Code::Await, address, value) }
}

/// Sends a vCPU the shootdown interrupt.
pub fn send(apic_id: u64) -> Operation {
    operation(Code::Send, 0x4081, apic_id)
}

/// Sends a vCPU INIT.
pub fn send_init(apic_id: u64) -> Operation {
    operation(Code::Send, 0x4500, apic_id)
}

/// Copies a page with a string instruction. It must not fault.
pub fn copy(to: u64, from: u64) -> Operation {
    operation(Code::Copy, to, from)
}

/// Fills a page with a 32-bit word, with a string instruction.
pub fn fill(page: u64, word: u64) -> Operation {
    operation(Code::Fill, page, word)
}

/// Writes one byte.
pub fn write_byte(address: u64, value: u64) -> Operation {
    operation(Code::WriteByte, address, value)
}

impl Operation {
    /// The operation in user mode.
    pub fn user(self) -> Self {
        let code = match self.code {
            Code::Read => Code::UserRead,
            Code::Write => Code::UserWrite,
            Code::Fetch => Code::UserFetch,
            Code::Add => Code::UserAdd,
            other => panic!("{other:?} is not for user mode"),
        };
        Self { code, ..self }
    }

    /// The operation with RFLAGS.AC set.
    pub fn with_ac(self) -> Self {
        Self { flags: self.flags | AC, ..self }
    }

    /// The words that the guest reads of the operation.
    pub fn words(&self) -> [u64; 8] {
        [self.code as u64, self.address, self.value, 0, 0, 0, 0, self.flags]
    }
}

/// What came of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// The operation was done. What was read, returned or replaced, or 0.
    Value(u64),
    /// A page fault with this error code and this CR2.
    Fault { error: u64, at: u64 },
    /// Another exception.
    Exception { vector: u64, error: u64 },
}

impl Seen {
    /// From the words that the guest left.
    pub fn of(value: u64, vector: u64, error: u64, cr2: u64) -> Self {
        match vector {
            0 => Self::Value(value),
            // Under TDP the lab's emulated CPU leaves the present bit out where a
            // reserved bit is set.
            0x10e if error & RSVD != 0 => Self::Fault { error: error | P, at: cr2 },
            0x10e => Self::Fault { error, at: cr2 },
            other => Self::Exception { vector: other & 0xff, error },
        }
    }
}

/// Error code: the entry was present.
pub const P: u64 = 1;
/// Error code: a write.
pub const W: u64 = 2;
/// Error code: user mode.
pub const U: u64 = 4;
/// Error code: a reserved bit is set.
pub const RSVD: u64 = 8;
/// Error code: an instruction fetch.
pub const F: u64 = 16;

/// A page fault.
pub fn fault(error: u64, at: u64) -> Seen {
    Seen::Fault { error, at }
}

/// The operation was done, and this is its value.
pub fn value(value: u64) -> Seen {
    Seen::Value(value)
}

/// The operation was done and has no value.
pub const DONE: Seen = Seen::Value(0);
