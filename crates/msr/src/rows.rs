//! The rows of the table as values: for the index lists, which are made from them when the crate is
//! compiled, and for `docs/msrs.md`. Nothing of them is in the module.

use x86::msr::*;

/// A row of the table.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// The name in [`x86::msr`], of a range the first one's.
    pub name: &'static str,
    /// The first MSR.
    pub first: u32,
    /// The last MSR.
    pub last: u32,
    /// The column "saved", as it is written.
    pub saved: &'static str,
    /// In KVM_GET_MSR_INDEX_LIST on some host.
    pub is_saved: bool,
    /// In KVM_GET_MSR_FEATURE_INDEX_LIST on some host.
    pub is_feature: bool,
    /// The value at power-up, as it is written; empty without a slot.
    pub power_up: &'static str,
    /// What reading does, as it is written; empty where another floor says.
    pub read: &'static str,
    /// What writing does, as it is written; empty where another floor says.
    pub write: &'static str,
    /// The note that `docs/msrs.md` gives.
    pub note: &'static str,
}

/// A part of the table.
#[derive(Clone, Copy, Debug)]
pub struct Section {
    /// What its MSRs have in common.
    pub about: &'static str,
    /// The rows of its MSRs.
    pub rows: &'static [Row],
}

macro_rules! last {
    ($first:expr) => {
        $first
    };
    ($first:expr, $last:expr) => {
        $last
    };
}

macro_rules! is_saved {
    ([saved $($rest:tt)*]) => {
        true
    };
    ($other:tt) => {
        false
    };
}

macro_rules! is_feature {
    ([feature $($rest:tt)*]) => {
        true
    };
    ([saved, feature $($rest:tt)*]) => {
        true
    };
    ($other:tt) => {
        false
    };
}

macro_rules! text {
    ([$($text:tt)*]) => {
        stringify!($($text)*)
    };
}

macro_rules! row {
    ($name:expr $(, ..= $last:expr)?; $saved:tt $up:tt $read:tt $write:tt $note:literal) => {
        Row {
            name: stringify!($name),
            first: $name,
            last: last!($name $(, $last)?),
            saved: text!($saved),
            is_saved: is_saved!($saved),
            is_feature: is_feature!($saved),
            power_up: text!($up),
            read: text!($read),
            write: text!($write),
            note: $note,
        }
    };
}

macro_rules! rows {
    (
        ($host:ident)
        Backend $b_about:literal { $($b:ident $b_saved:tt $b_check:tt $b_note:literal;)* }
        Pv $p_about:literal { $($p:ident $p_saved:tt $p_note:literal;)* }
        HyperV $h_about:literal { $($h:ident $h_saved:tt $h_note:literal;)* }
        Kept $k_about:literal { $(
            $k:ident $k_saved:tt $k_up:tt $k_read:tt $k_write:tt $k_note:literal;
        )* }
        Outside $o_about:literal { $(
            $o:ident $o_saved:tt $o_up:tt $o_read:tt $o_write:tt $o_note:literal;
        )* }
        Fixed $f_about:literal { $(
            $f:tt $(..= $f_last:tt)? [$($f_saved:tt)*] $f_read:tt $f_write:tt $f_note:literal;
        )* }
        Apic $a_about:literal { $($a:ident $a_saved:tt $a_note:literal;)* }
    ) => {
        /// The whole table.
        pub const TABLE: &[Section] = &[
            Section { about: $b_about, rows: &[$(row!($b; $b_saved [] [] $b_check $b_note)),*] },
            Section { about: $p_about, rows: &[$(row!($p; $p_saved [] [] [] $p_note)),*] },
            Section { about: $h_about, rows: &[$(row!($h; $h_saved [] [] [] $h_note)),*] },
            Section { about: $k_about, rows: &[$(row!($k; $k_saved $k_up $k_read $k_write $k_note)),*] },
            Section { about: $o_about, rows: &[$(row!($o; $o_saved $o_up $o_read $o_write $o_note)),*] },
            Section {
                about: $f_about,
                rows: &[$(
                    row!($f $(, ..= $f_last)?; [$($f_saved)*] [] $f_read $f_write $f_note)
                ),*],
            },
            Section { about: $a_about, rows: &[$(row!($a; $a_saved [] [] [] $a_note)),*] },
        ];
    };
}

msrs!(rows);

/// One of the two index lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum List {
    /// Saved and restored: KVM_GET_MSR_INDEX_LIST names it.
    Saved,
    /// A feature: KVM_GET_MSR_FEATURE_INDEX_LIST names it.
    Features,
}

impl List {
    const fn has(self, row: &Row) -> bool {
        match self {
            Self::Saved => row.is_saved,
            Self::Features => row.is_feature,
        }
    }

    /// How many MSRs it names.
    pub(crate) const fn count(self) -> usize {
        let mut count = 0;
        // By hand: a constant cannot use iterators.
        let mut sections = TABLE;
        while let [section, later @ ..] = sections {
            let mut rows = section.rows;
            while let [row, rest @ ..] = rows {
                if self.has(row) {
                    count += (row.last - row.first + 1) as usize;
                }
                rows = rest;
            }
            sections = later;
        }
        count
    }

    /// The numbers of all of them, in the order of the rows.
    pub(crate) const fn numbers<const N: usize>(self) -> [u32; N] {
        let mut list = [0; N];
        let mut count = 0;
        let mut sections = TABLE;
        while let [section, later @ ..] = sections {
            let mut rows = section.rows;
            while let [row, rest @ ..] = rows {
                let mut index = row.first;
                while self.has(row) && index <= row.last {
                    list[count] = index;
                    count += 1;
                    // Ranges are in the lists number by number.
                    index += 1;
                }
                rows = rest;
            }
            sections = later;
        }
        list
    }
}
