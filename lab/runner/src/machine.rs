//! The emulated machines that the lab has.

use anyhow::{Result, bail};
use std::str::FromStr;

/// An emulated machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Machine {
    /// QEMU's software emulator with SVM and TDP.
    Amd,
    /// Bochs with VMX, EPT and unrestricted guest.
    Intel,
}

/// Both machines, the default first.
pub const MACHINES: [Machine; 2] = [Machine::Amd, Machine::Intel];

impl Machine {
    /// The name as users write it.
    pub fn name(self) -> &'static str {
        match self {
            Machine::Amd => "amd",
            Machine::Intel => "intel",
        }
    }

    /// The processor that the emulator shows, in its words: with SVM or VMX, TDP and x2APIC.
    pub fn processor(self) -> &'static str {
        match self {
            Machine::Amd => "EPYC,+svm,+npt,+x2apic",
            Machine::Intel => "corei7_skylake_x",
        }
    }

    /// The emulator, in a sentence for users.
    pub fn emulator(self) -> &'static str {
        match self {
            Machine::Amd => "QEMU's software emulator",
            Machine::Intel => "Bochs",
        }
    }

    /// The group of `lab/packages.txt` that the emulator is.
    pub fn group(self) -> &'static str {
        match self {
            Machine::Amd => "qemu",
            Machine::Intel => "bochs",
        }
    }

    /// The stock module that needs this machine's processor.
    pub fn stock_module(self) -> &'static str {
        match self {
            Machine::Amd => "kvm-amd",
            Machine::Intel => "kvm-intel",
        }
    }
}

impl FromStr for Machine {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "amd" => Ok(Machine::Amd),
            "intel" => Ok(Machine::Intel),
            _ => bail!("MACHINE={text}: the lab has amd and intel"),
        }
    }
}
