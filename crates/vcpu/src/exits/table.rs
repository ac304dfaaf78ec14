//! The one table of exits: what each is counted as, who answers it inside the inner loop, and who
//! handles it outside when the loop was left for it.
//!
//! A row is `Exit = Reason: inside, outside;`. From the rows follow the two functions that answer
//! inside ([`Answer::frequent`], [`Answer::rare`]), the two that handle outside ([`Vcpu::handle`],
//! [`Vcpu::handle_rare`]), and [`reason_of`], for who observes. None of them is written by hand, so an
//! exit cannot be counted in one place and forgotten in another: each is counted when it happens,
//! inside, by its row's reason, whoever answers it then; and once more outside, if it gets there.
//!
//! A row that says `stays` has no instruction of the guest's retire: an event, or a fault instead of one. What is
//! answered inside alone, and says `Ok(())` outside, has to be of that kind, since a guest's guest whose hypervisor
//! hears of each instruction has all others answered outside ([`stays`]).
//!
//! Adding an exit: a variant of [`Exit`], a line in the backend that decodes it, a row here and its
//! handler. Without the row [`reason_of`] does not compile.
//!
//! The groups say where the code of a row lies, which is what they are for: kernel code is built
//! without jump tables, and the loop is to be small.
//!
//! - `first`: inlined into the loop at the backend's own comparison ([`Turn::dispatch`](backend::Turn::dispatch)), and
//!   first to be looked at outside: what a running guest leaves the loop for.
//! - `frequent`: inlined into the loop as well; outside they are rare.
//! - `rare`: answered in the loop, by way of one call.
//! - `outside`: never answered in the loop.
//!
//! The order of comparisons inside is the backend's: it hands each frequent kind over as a constant.
//! Not counted are leaving quietly and not entering, which are no exits ([`Left`]).

use backend::{Answer, Backend, Exit};
use emulate::Cause;
use mmu::Section;
use stats::Reason;
use x86::{Direction, Exception};

use crate::{
    Vcpu,
    run::inner::{answer_debug_reg, answer_interrupt_window, answer_nmi_window},
    run::outcome::{Left, Next, Outcome},
};

/// Whether a row says `stays`.
macro_rules! marked {
    () => {
        false
    };
    (stays) => {
        true
    };
}

macro_rules! exits {
    (
        ($v:ident, $s:ident)
        first { $($f:ident $(($fp:ident))? = $fr:ident $($fs:ident)?: $fin:expr, $fout:expr;)* }
        frequent { $($c:ident $(($cp:ident))? = $cr:ident $($cs:ident)?: $cin:expr, $cout:expr;)* }
        rare { $($r:ident $(($rp:ident))? = $rr:ident $($rs:ident)?: $rin:expr, $rout:expr;)* }
        outside { $($o:ident $(($op:ident))? = $or:ident $($os:ident)?: $oout:expr;)* }
    ) => {
        /// The reason that an exit is counted by.
        pub(crate) fn reason_of(exit: &Exit) -> Reason {
            match exit {
                $(Exit::$f { .. } => Reason::$fr,)*
                $(Exit::$c { .. } => Reason::$cr,)*
                $(Exit::$r { .. } => Reason::$rr,)*
                $(Exit::$o { .. } => Reason::$or,)*
            }
        }

        /// Whether no instruction of the guest's retires with that exit, however it is answered.
        pub(crate) fn stays(exit: &Exit) -> bool {
            match exit {
                $(Exit::$f { .. } => marked!($($fs)?),)*
                $(Exit::$c { .. } => marked!($($cs)?),)*
                $(Exit::$r { .. } => marked!($($rs)?),)*
                $(Exit::$o { .. } => marked!($($os)?),)*
            }
        }

        /// Answers an exit if that is possible without leaving the loop. Each reason is counted in its
        /// own arm, where the counter's place is a constant.
        #[allow(unused_variables, reason = "not each side of a row needs what the exit comes with")]
        impl<'s, B: Backend> Answer<B, Section<'s>> for Vcpu<B> {
            type Left = Left;

            #[inline(always)]
            fn backend(&self) -> &B {
                &self.b
            }

            #[inline(always)]
            fn frequent(&mut self, $s: Section<'s>, exit: Exit) -> Option<Left> {
                let $v = self;
                let next = match exit {
                    $(Exit::$f $(($fp))? => {
                        $v.stats.exit(Reason::$fr);
                        $fin
                    })*
                    $(Exit::$c $(($cp))? => {
                        $v.stats.exit(Reason::$cr);
                        $cin
                    })*
                    exit => return $v.rare($s, exit),
                };
                next.left(exit)
            }

            #[inline(never)]
            fn rare(&mut self, $s: Section<'s>, exit: Exit) -> Option<Left> {
                let $v = self;
                let next = match exit {
                    $(Exit::$r $(($rp))? => {
                        $v.stats.exit(Reason::$rr);
                        $rin
                    })*
                    exit => $v.answer_outside(&exit),
                };
                next.left(exit)
            }
        }

        #[allow(unused_variables, reason = "not each side of a row needs what the exit comes with")]
        impl<B: Backend> Vcpu<B> {
            /// An exit that is never answered in the loop. Of those, all are one case to the comparisons
            /// before it, and none has a counter of its own there.
            #[cold]
            #[inline(never)]
            fn answer_outside(&mut self, exit: &Exit) -> Next {
                // By a look-up and not in an arm each: what is never answered here may cost a
                // little more.
                self.stats.exit(reason_of(exit));
                Next::Leave
            }

            /// Handles an exit that the loop was left for.
            #[inline(always)]
            pub(crate) fn handle(&mut self, exit: &Exit) -> Outcome {
                let $v = self;
                match exit {
                    $(Exit::$f $(($fp))? => {
                        $v.stats.outside(Reason::$fr);
                        $fout
                    })*
                    _ => $v.handle_rare(exit),
                }
            }

            /// Handles the other exits: those of a guest that does something unusual, or whose page
            /// of code is not there.
            #[cold]
            #[inline(never)]
            fn handle_rare(&mut self, exit: &Exit) -> Outcome {
                self.stats.outside(reason_of(exit));
                let $v = self;
                match exit {
                    // Handled by the caller.
                    $(Exit::$f { .. } => Ok(()),)*
                    $(Exit::$c $(($cp))? => $cout,)*
                    $(Exit::$r $(($rp))? => $rout,)*
                    $(Exit::$o $(($op))? => $oout,)*
                }
            }
        }

        /// The rows: a variant each, its reason, whether it stays, and what is done outside.
        #[cfg(test)]
        const ROWS: &[(&str, Reason, bool, &str)] = &[
            $((stringify!($f), Reason::$fr, marked!($($fs)?), stringify!($fout)),)*
            $((stringify!($c), Reason::$cr, marked!($($cs)?), stringify!($cout)),)*
            $((stringify!($r), Reason::$rr, marked!($($rs)?), stringify!($rout)),)*
            $((stringify!($o), Reason::$or, marked!($($os)?), stringify!($oout)),)*
        ];
    };
}

// `Ok(())` outside: it never gets there, or what it asks for was done when the loop was left.
exits! { (v, s)
    first {
        TdpFault(fault) = TdpFault:        v.answer_mmio(s, fault),       v.tdp_fault(*fault);
        Io(io)          = Io:              v.answer_io(s, io),            v.slow_io(io);
        Hlt             = Hlt:             v.answer_hlt(s),               v.halt();
    }
    frequent {
        Cpuid           = Cpuid:           v.answer_cpuid(s),             v.slow_cpuid();
        Wrmsr           = Wrmsr:           v.answer_wrmsr(s),             v.slow_msr(Direction::Write);
        Rdmsr           = Rdmsr:           v.answer_rdmsr(s),             v.slow_msr(Direction::Read);
        PageFault(f)    = PageFault:       v.answer_page_fault(s, f),     v.page_fault(*f);
        Hypercall       = Hypercall:       v.answer_hypercall(s),         v.slow_hypercall();
        Cr(access)      = Cr:              v.answer_cr(s, access),        v.emulate_cr(*access);
        Interrupt       = Interrupt stays: Next::Leave,                   Ok(());
        Deadline        = Deadline stays:  v.expire_hv_timer(s),          Ok(());
    }
    rare {
        CacheFlush      = CacheFlush:      v.answer_nothing(s),           v.skip();
        Invlpg(at)      = Invlpg:          v.answer_invlpg(s, at),        v.emulate_here(Cause::Invlpg);
        Xsetbv          = Xsetbv:          v.answer_xsetbv(s),            v.slow_instruction(Self::do_xsetbv);
        InterruptWindow = InterruptWindow stays: answer_interrupt_window(&mut v.b, &mut v.pending), Ok(());
        PriorityLowered = InterruptWindow stays: answer_interrupt_window(&mut v.b, &mut v.pending), Ok(());
        DebugReg(access) = DebugReg:       answer_debug_reg(&mut v.b, &v.rare.debug), v.slow_debug_reg(*access);
        Mwait           = Mwait:           v.answer_mwait(s),             v.skip();
        Undefined       = Undefined stays: v.answer_by(Exception::ud()),  Ok(());
        Virtualization  = Virtualization:  v.answer_virtualization(s),    v.slow_virtualization();
        Rdpmc           = Rdpmc stays:     v.answer_by(Exception::gp(0)), Ok(());
        GdtrIdtr        = DescriptorTable: v.answer_table_access(s),  v.table_access(Cause::GdtrIdtr);
        LdtrTr          = DescriptorTable: v.answer_table_access(s),  v.table_access(Cause::LdtrTr);
        Eoi(vector)     = Eoi stays:       v.answer_eoi(vector),          Ok(());
        IllegalSelfIpi  = ApicWrite stays: v.answer_illegal_self_ipi(),   Ok(());
        Iret            = Iret stays:      answer_nmi_window(&mut v.b, &mut v.pending), Ok(());
        NmiWindow       = Iret stays:      answer_nmi_window(&mut v.b, &mut v.pending), Ok(());
    }
    outside {
        Exception(e)    = Exception:       v.exception(*e);
        Pause           = Pause:           v.pause();
        Invpcid         = Invlpg:          v.slow_invpcid();
        TaskSwitch(to)  = TaskSwitch:      v.task_switch(*to);
        Rsm             = Rsm:             v.slow_rsm();
        Shutdown        = Shutdown:        v.shut_down();
        Refused         = Refused:         v.entry_refused();
        Unknown(code)   = Other:           v.unexpected_exit();
        Nmi             = Nmi stays:       Ok(());
        HostSignal      = HostSignal stays: Ok(());
        MachineCheck    = MachineCheck stays: Ok(());
        PageLogFull     = Other stays:     Ok(());
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::*;

    #[test]
    fn each_exit_has_one_row_and_each_reason_an_exit() {
        let mut names: Vec<_> = ROWS.iter().map(|(name, ..)| name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), ROWS.len());
        for reason in stats::reason::ALL {
            assert!(ROWS.iter().any(|(_, of, ..)| of == reason), "{reason:?} counts nothing");
        }
    }

    #[test]
    fn what_is_answered_inside_alone_retires_no_instruction() {
        for (name, _, stays, outside) in ROWS {
            assert!(*stays || *outside != "Ok(())", "{name}");
        }
    }
}
