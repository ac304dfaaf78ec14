//! What is kept of a guest's guest between two of its runs.

use backend::TSC_RATIO_ONE;
use host::{KBox, NoMemory, page::Page};
use nested_svm::{permission::OpenWords, vmcb12::Vmcb12};

use x86::{Hpa, vmcb::event};

use crate::block::ControlBlock;

/// An event that L1 injected: an interrupt, an NMI, INT n, INT3 or INTO.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Injected {
    /// EVENTINJ.
    pub(crate) event: u64,
    /// RIP, which is not at the instruction. `None`: the state was restored, and it is not injected yet.
    pub(crate) rip: Option<u64>,
    /// Where the CPU says that the instruction ends.
    pub(crate) next_rip: u64,
}

/// Whether EVENTINJ holds an event that an instruction makes: INT n, INT3, INTO.
pub(crate) fn is_by_instruction(event_inj: u64) -> bool {
    let kind = event_inj & (event::VALID | event::TYPE);
    kind == event::VALID | event::SOFT
        || (kind == event::VALID | event::EXCEPTION && matches!(event_inj & event::VECTOR, 3 | 4))
}

/// Whether EVENTINJ holds an interrupt: one of L1's machine that waits for it is told in the same words.
pub(crate) fn is_interrupt(event_inj: u64) -> bool {
    event_inj & (event::VALID | event::TYPE) == event::VALID | event::INTR
        && event_inj & event::VECTOR != 0
}

impl Injected {
    /// Whether it is an NMI.
    pub(crate) const fn is_nmi(self) -> bool {
        self.event & event::TYPE == event::NMI
    }

    /// Whether EXITINTINFO names it.
    pub(crate) const fn is(self, info: u64) -> bool {
        // The vector of an NMI is what L1 happens to have written.
        let vector = if self.is_nmi() { 0 } else { event::VECTOR };
        (self.event ^ info) & (event::VALID | event::TYPE | vector) == 0
    }
}

/// What L2's TSC is made by, and what the CPU has of ratios.
#[derive(Debug)]
pub(crate) struct TscBelow {
    /// By what it is made from L1's.
    pub(crate) ratio_of_l2: u64,
    /// What of L1's offset it has, to which L1 adds one.
    pub(crate) offset: u64,
    /// What the CPU has to have while the level runs that is current.
    pub(crate) ratio_here: u64,
}

impl Default for TscBelow {
    fn default() -> Self {
        Self { ratio_of_l2: TSC_RATIO_ONE, offset: 0, ratio_here: TSC_RATIO_ONE }
    }
}

/// What is known of L1's guest.
#[derive(Debug)]
pub struct State {
    /// The block that does not run.
    pub(crate) other: ControlBlock,
    /// The copy of L1's block.
    pub(crate) v12: KBox<Vmcb12>,
    /// What L1 injected that looks like an event of another's, until it is delivered.
    pub(crate) injected: Option<Injected>,
    /// V_IRQ of L2's block stands for a window of ours; whether it was set for L1 before.
    pub(crate) window: Option<bool>,
    /// VMRUN was carried out, and L2 has not been entered yet.
    pub(crate) entry_pending: bool,
    /// The address-space id that L1 gave what L2's block remembers.
    pub(crate) asid: u32,
    /// CR0.CD and CR0.NW of the level that does not run, as far as they are hidden from the hardware.
    pub(crate) cr0_hidden: u32,
    /// RFLAGS.IF of L1 at VMRUN.
    pub(crate) l1_interrupts: bool,
    /// Where our own MSR map is open.
    pub(crate) open: Option<OpenWords<16>>,
    /// What the hardware walks for L2 with tables of L1's.
    pub(crate) root: Hpa,
    /// L1 has flushed L2's translations, and its tables have not been looked at since.
    pub(crate) flushed: bool,
    /// A root that leads nowhere: until there is another.
    _empty: Page,
}

impl State {
    /// Nothing is known yet.
    #[inline(never)]
    pub(crate) fn new() -> Result<KBox<Self>, NoMemory> {
        let empty = Page::zeroed()?;
        let mut v12 = KBox::<Vmcb12>::zeroed()?;
        // Zeros would be the block at address 0.
        v12.forget();
        KBox::new(Self {
            // A block with pages and an ASID of its own: L2's translations must not be taken for
            // L1's.
            other: ControlBlock::new()?,
            v12,
            injected: None,
            window: None,
            entry_pending: false,
            asid: 0,
            cr0_hidden: 0,
            l1_interrupts: false,
            open: None,
            root: empty.hpa(),
            flushed: false,
            _empty: empty,
        })
    }
}
