//! The layout table of the XSAVE area.
//!
//! A component's size, its offset in the standard format and its flags never change at run time:
//! they do not depend on XCR0 or XSS (SDM vol. 1 §13.4.3). CPUID is slow, and where the host is
//! itself a guest each one is an exit; so the leaf is read once and sizes are computed here.

use x86::Xcr0;
use x86::cpuid::leaf;

/// Bytes of the legacy region (512) and the XSAVE header (64), which every area has.
pub const LEGACY_AND_HEADER: u32 = 576;

/// Components that the manuals define, up to APX (19). A CPU may have later ones; they are never
/// offered to a guest, so the table has no room for them.
const COMPONENTS: usize = 20;
const KNOWN: u64 = (1 << COMPONENTS) - 1;
/// The components that have a place of their own behind the header.
const EXTENDED: u64 = 0x7fff_ffff_ffff_fffc;

/// One state component, as CPUID.0xD.n tells it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Component {
    /// Bytes; 0 when the CPU does not have the component.
    pub size: u32,
    /// Offset in the standard format; 0 for supervisor components, which have none.
    pub offset: u32,
    /// ECX of the subleaf, see the `is_*` methods.
    pub flags: u32,
}

impl Component {
    /// Reads EAX, EBX and ECX of the component's subleaf.
    pub const fn from_cpuid(answer: &[u32; 4]) -> Self {
        let [size, offset, flags, _] = *answer;
        Self { size, offset, flags }
    }

    /// Managed by XSS, not by XCR0.
    #[inline]
    pub const fn is_supervisor(&self) -> bool {
        self.flags & 1 != 0
    }

    /// Starts at a multiple of 64 bytes in the compacted format.
    #[inline]
    pub const fn is_aligned(&self) -> bool {
        self.flags & 2 != 0
    }

    /// Can be disabled by XFD.
    #[inline]
    pub const fn is_xfd(&self) -> bool {
        self.flags & 4 != 0
    }
}

/// How an XSAVE area lays its components out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Each at the offset that CPUID gives for it.
    Standard,
    /// One behind the other.
    Compacted,
}

/// The table of all components of this CPU. 264 bytes: every vCPU keeps its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    components: [Component; COMPONENTS],
    user: u64,
    supervisor: u64,
}

impl Default for Layout {
    fn default() -> Self {
        Self::EMPTY
    }
}

impl Layout {
    /// A CPU without XSAVE: only the legacy region.
    pub const EMPTY: Self = Self {
        components: [Component { size: 0, offset: 0, flags: 0 }; COMPONENTS],
        user: 0,
        supervisor: 0,
    };

    /// Reads CPUID leaf 0xD with `cpuid(leaf, subleaf)`. At most 2 plus one call per component
    /// that the CPU has. The caller has seen that the leaf exists (feature XSAVE).
    pub fn read(mut cpuid: impl FnMut(u32, u32) -> [u32; 4]) -> Self {
        let [eax, _, _, edx] = cpuid(leaf::XSAVE, 0);
        let user = u64::from(eax) | u64::from(edx) << 32;
        let [features, _, ecx, edx] = cpuid(leaf::XSAVE, 1);
        // Without XSAVES, ECX and EDX of subleaf 1 are reserved.
        // Supervisor components are saved by XSAVES alone.
        let supervisor =
            if features & (1 << 3) != 0 { u64::from(ecx) | u64::from(edx) << 32 } else { 0 };
        // A component that nobody here knows is offered to nobody, so its size does not matter.
        let (user, supervisor) = (user & KNOWN, supervisor & KNOWN);
        let mut layout = Self { user, supervisor, ..Self::EMPTY };
        let known = (user | supervisor) & EXTENDED;
        for (index, component) in layout.components.iter_mut().enumerate() {
            // Only of components that exist: each CPUID is an exit where the host is a guest.
            if known & (1u64 << index) != 0 {
                *component = Component::from_cpuid(&cpuid(leaf::XSAVE, index as u32));
            }
        }
        layout
    }

    /// Known components that XCR0 may enable on this CPU.
    #[inline]
    pub const fn user_components(&self) -> u64 {
        self.user
    }

    /// Known components that XSS may enable on this CPU.
    #[inline]
    pub const fn supervisor_components(&self) -> u64 {
        self.supervisor
    }

    /// The component `index`; `None` when the CPU does not have it or it lies in the legacy
    /// region (0 and 1).
    #[inline]
    pub fn component(&self, index: u32) -> Option<&Component> {
        // The guest names the subleaf.
        // A component of no size is none: CPUID answers zeros for what the CPU lacks.
        host::GuestIndex::from(index).of(&self.components).filter(|component| component.size != 0)
    }

    /// Bytes of an XSAVE area that holds `components` (a value of XCR0, or of XCR0 | XSS for the
    /// compacted format): what CPUID.0xD.0:EBX (standard) or CPUID.0xD.1:EBX (compacted) answers.
    /// Components that the CPU does not have count nothing.
    pub fn required_size(&self, components: u64, form: Form) -> u32 {
        required_size(components, form, |index| {
            host::GuestIndex::from(index).of(&self.components).copied().unwrap_or_default()
        })
    }

    /// [`Self::required_size`] computed without the table, by executing CPUID for each component:
    /// what the `xstate_cache=0` switch measures against.
    pub fn required_size_uncached(
        components: u64,
        form: Form,
        mut cpuid: impl FnMut(u32, u32) -> [u32; 4],
    ) -> u32 {
        required_size(components & KNOWN, form, |index| {
            Component::from_cpuid(&cpuid(leaf::XSAVE, index))
        })
    }

    /// Offset of component `index` in an area whose format bits (XCOMP_BV in the compacted
    /// format) are `components`. `None` when the component is not among them, or when it is a
    /// supervisor component in the standard format.
    pub fn offset_of(&self, index: u32, components: u64, form: Form) -> Option<u32> {
        let wanted = *self.component(index)?;
        // An index of 64 and above is no component.
        if components.checked_shr(index)? & 1 == 0 {
            return None;
        }
        if form == Form::Standard {
            // A supervisor component has no place in the standard format (SDM vol. 1 §13.4.3).
            return (!wanted.is_supervisor()).then_some(wanted.offset);
        }
        // Only components below take part in where this one begins (SDM vol. 1 §13.4.3).
        let below = components & 1u64.checked_shl(index)?.wrapping_sub(1);
        let end = self.required_size(below, Form::Compacted);
        Some(if wanted.is_aligned() { align64(end) } else { end })
    }

    /// Bytes that a user-space buffer needs for every component of `xcr0` in the standard format,
    /// never less than the 4096 of `struct kvm_xsave` (KVM API, KVM_CAP_XSAVE2).
    pub fn uabi_size(&self, xcr0: Xcr0) -> u32 {
        self.required_size(xcr0.bits(), Form::Standard).max(4096)
    }
}

fn required_size(components: u64, form: Form, mut component: impl FnMut(u32) -> Component) -> u32 {
    let mut size = LEGACY_AND_HEADER;
    // The header stands before all of them in both forms; the legacy region is in it.
    let mut left = components & EXTENDED;
    while left != 0 {
        let index = left.trailing_zeros();
        left &= left - 1;
        let component = component(index);
        // As CPUID does, which knows nothing of it.
        if component.size == 0 {
            continue;
        }
        let offset = match form {
            Form::Compacted if component.is_aligned() => align64(size),
            Form::Compacted => size,
            Form::Standard => component.offset,
        };
        // In the standard format a later component may lie before an earlier one.
        size = size.max(offset.saturating_add(component.size));
    }
    size
}

const fn align64(bytes: u32) -> u32 {
    bytes.saturating_add(63) & !63
}
