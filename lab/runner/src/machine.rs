//! The emulated machines that the lab has.

use anyhow::{Result, bail};
use std::fmt;
use std::str::FromStr;

/// An emulated machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Machine {
    /// QEMU's software emulator with SVM and TDP.
    Amd,
    /// Bochs with VMX, EPT and unrestricted guest.
    Intel,
    /// Bochs with SVM, TDP and NRIP save.
    AmdNrip,
}

/// The program that a machine runs in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Emulator {
    /// QEMU, without the help of KVM.
    Qemu,
    /// Bochs.
    Bochs,
}

/// The machines on which everything runs that names none, the default first: one of each vendor. `amd-nrip` has to be named.
pub const MACHINES: [Machine; 2] = [Machine::Amd, Machine::Intel];

impl Machine {
    /// The name as users write it.
    pub fn name(self) -> &'static str {
        match self {
            Machine::Amd => "amd",
            Machine::Intel => "intel",
            Machine::AmdNrip => "amd-nrip",
        }
    }

    /// The processor that the emulator shows, in its words: with SVM or VMX, and TDP; with x2APIC where it has one.
    pub fn processor(self) -> &'static str {
        match self {
            Machine::Amd => "EPYC,+svm,+npt,+x2apic",
            Machine::Intel => "corei7_skylake_x",
            Machine::AmdNrip => "ryzen",
        }
    }

    /// The emulator.
    pub fn emulator(self) -> Emulator {
        match self {
            Machine::Amd => Emulator::Qemu,
            Machine::Intel | Machine::AmdNrip => Emulator::Bochs,
        }
    }

    /// Whether its processor is of AMD's kind.
    pub fn has_svm(self) -> bool {
        self != Machine::Intel
    }

    /// The group of `lab/packages.txt` that the emulator is.
    pub fn group(self) -> &'static str {
        match self.emulator() {
            Emulator::Qemu => "qemu",
            Emulator::Bochs => "bochs",
        }
    }

    /// The stock module that needs this machine's processor.
    pub fn stock_module(self) -> &'static str {
        if self.has_svm() { "kvm-amd" } else { "kvm-intel" }
    }
}

/// In a sentence for users.
impl fmt::Display for Emulator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Emulator::Qemu => "QEMU's software emulator",
            Emulator::Bochs => "Bochs",
        })
    }
}

impl FromStr for Machine {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "amd" => Ok(Machine::Amd),
            "intel" => Ok(Machine::Intel),
            "amd-nrip" => Ok(Machine::AmdNrip),
            _ => bail!("MACHINE={text}: the lab has amd, intel and amd-nrip"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_is_found_by_its_name() {
        for machine in [Machine::Amd, Machine::Intel, Machine::AmdNrip] {
            assert_eq!(machine.name().parse::<Machine>().unwrap(), machine);
        }
        assert!("amd_nrip".parse::<Machine>().unwrap_err().to_string().contains("amd-nrip"));
    }

    #[test]
    fn each_vendor_runs_where_no_machine_is_named() {
        assert_eq!(MACHINES.map(Machine::stock_module), ["kvm-amd", "kvm-intel"]);
        assert_eq!(Machine::AmdNrip.stock_module(), Machine::Amd.stock_module());
        assert_eq!(Machine::AmdNrip.emulator(), Machine::Intel.emulator());
    }
}
