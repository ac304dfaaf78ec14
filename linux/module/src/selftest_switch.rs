//! The world switch in the kernel, without a VM around it: a guest of four instructions in real
//! mode over a nested page table of one page.

use core::sync::atomic::Ordering::Relaxed;

use backend::Gprs;
use cpu::{Cpu, Native, SpecCtrl};
use host::page::Page;
use host::{clock, info, irq};
use x86::vmcb::{Vmcb, VmcbSegment};

/// inc ecx; inc ebx; vmmcall; jmp back to the first.
const GUEST: [u8; 9] = [0x66, 0x41, 0x66, 0x43, 0x0f, 0x01, 0xd9, 0xeb, 0xf7];
const EXIT_INTR: u64 = 0x60;
const EXIT_VMMCALL: u64 = 0x81;

fn block(vmcb: &mut Vmcb, nested_root: u64) {
    vmcb.control.intercepts[3] = 0b11;
    vmcb.control.intercepts[4] = 0b11;
    vmcb.control.asid = 1;
    vmcb.control.tlb_ctl = 1;
    vmcb.control.int_ctl = 1 << 24;
    vmcb.control.nested_ctl = 1;
    vmcb.control.nested_cr3 = nested_root;
    for segment in &mut vmcb.save.segments {
        *segment = VmcbSegment { selector: 0, attrib: 0x93, limit: 0xffff, base: 0 };
    }
    vmcb.save.segments[x86::vmcb::SEG_CS].attrib = 0x9b;
    vmcb.save.segments[x86::vmcb::SEG_LDTR].attrib = 0x82;
    vmcb.save.segments[x86::vmcb::SEG_TR].attrib = 0x8b;
    vmcb.save.efer = 1 << 12;
    vmcb.save.cr0 = 0x10;
    vmcb.save.dr6 = 0xffff_0ff0;
    vmcb.save.dr7 = 0x400;
    vmcb.save.rflags = 2;
    vmcb.save.g_pat = 0x0007_0406_0007_0406;
}

/// Enters the guest until it has called `rounds` times; checks every register on the way.
pub(crate) fn run(rounds: u64) -> Result<(), u32> {
    let page = || Page::zeroed().map_err(|_| line!());
    let (own, host, code) = (page()?, page()?, page()?);
    let tables = [page()?, page()?, page()?, page()?];
    for (to, from) in code.bytes().iter().zip(GUEST) {
        to.store(from, Relaxed);
    }
    let targets = [tables[1].hpa(), tables[2].hpa(), tables[3].hpa(), code.hpa()];
    for (table, target) in tables.iter().zip(targets) {
        table.table()[0].store(target.0 | 7, Relaxed);
    }
    // SAFETY: the page is owned, and every bit pattern is a Vmcb.
    let vmcb = unsafe { &mut *own.bytes_ptr().cast::<Vmcb>() };
    block(vmcb, tables[0].hpa().0);

    let mut gprs = Gprs([0x1000; 16]);
    for (i, word) in gprs.0.iter_mut().enumerate().skip(8) {
        *word = 0xabcd_0000_0000_0000 + i as u64;
    }
    let before = gprs.0;
    let (mut calls, mut interrupts) = (0, 0u64);
    let mut other = None;
    let mut ticks = 0;
    let started = clock::monotonic_ns();
    let mut c = Native;
    while calls < rounds && other.is_none() {
        irq::disable();
        c.clgi();
        irq::enable();
        c.vmsave(host.hpa());
        c.vmload(own.hpa());
        let start = c.rdtsc();
        loop {
            c.vmrun(vmcb, own.hpa(), &mut gprs, SpecCtrl::default());
            vmcb.control.tlb_ctl = 0;
            match vmcb.control.exit_code {
                EXIT_VMMCALL => {
                    calls += 1;
                    vmcb.save.rip = vmcb.save.rip.wrapping_add(3);
                    if calls == rounds {
                        break;
                    }
                }
                EXIT_INTR => {
                    interrupts += 1;
                    break;
                }
                code => {
                    other = Some(code);
                    break;
                }
            }
        }
        ticks += c.rdtsc().wrapping_sub(start);
        c.vmsave(own.hpa());
        c.vmload(host.hpa());
        irq::disable();
        c.stgi();
        irq::enable();
    }
    if let Some(code) = other {
        host::err!("exit {code:#x}, rip {:#x}", vmcb.save.rip);
        return Err(line!());
    }
    info!(
        "world switch: {calls} calls, {interrupts} interrupts, {} ticks each, {} us in all",
        ticks.checked_div(rounds).unwrap_or(0),
        (clock::monotonic_ns() - started) / 1000
    );
    for (i, (now, was)) in gprs.0.iter().zip(before).enumerate() {
        let counted = matches!(i, 1 | 3);
        // A 32-bit operation clears the upper half; neither register had one.
        let expected = if counted { was.wrapping_add(rounds) & 0xffff_ffff } else { was };
        if *now != expected {
            host::err!("register {i} is {now:#x}, not {expected:#x}");
            return Err(line!());
        }
    }
    Ok(())
}
