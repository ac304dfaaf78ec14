//! What the same tables and the same frames mean after the vCPU has become another: by its own control registers, by
//! KVM_SET_SREGS, KVM_SET_CPUID2, INIT, a slot that came or went. Nothing of the old meaning may be left.

use kvm_bindings::*;

use crate::kvm::exit::Exit;
use crate::kvm::file::{Commands, CpuidTable, System};
use crate::kvm::ioctl;
use crate::machine::layout::PORT_DONE;
use crate::machine::memory::{Memory, PAGE};
use crate::machine::stage::operation::*;
use crate::machine::stage::paging::*;
use crate::machine::stage::{
    CR0, NXE, PAE, PG, PSE, SMAP, SMEP, Stage, WP, in_each_mode, in_each_wide_mode, mark, tag,
};
use crate::oracle;
use crate::outcome::{Answer, Outcome, equal, holds, skip};
use crate::runner::tests;

tests!("paging_roles":
    kvm_set_sregs_changes_the_root,
    kvm_set_sregs_changes_wp_smep_and_smap,
    kvm_set_sregs_changes_nxe,
    kvm_set_sregs_turns_a_guest_into_another,
    a_frame_is_the_root_of_one_format_and_then_of_another,
    a_guest_changes_between_legacy_and_pae_by_itself,
    a_table_frame_is_a_page_and_a_table_of_each_level,
    a_frame_of_a_large_page_is_a_table_too,
    a_large_page_and_a_table_begin_at_the_same_frame,
    a_large_page_with_two_permissions,
    a_quarter_of_a_legacy_directory_is_not_another,
    the_same_table_with_and_without_execution,
    kvm_set_cpuid2_again_changes_nothing,
    a_narrow_physical_address_makes_bits_reserved,
    without_gigabyte_pages_their_bit_is_reserved,
    a_gigabyte_page_is_one_page,
    without_nx_in_cpuid_there_is_no_nxe,
    init_forgets_the_paging_mode,
    a_vcpu_reset_by_the_vmm_starts_from_nothing,
    toggles_around_a_slot_change,
    two_vcpus_with_different_control_bits_share_tables,
);

fn kvm_set_sregs_changes_the_root() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let frames = [stage.frame(), stage.frame()];
        let roots = [stage.root, stage.light_root()];
        for (root, frame) in roots.into_iter().zip(frames) {
            stage.map_in(root, va, 1, frame | ALL);
        }
        for round in 0..12 {
            let at = round % 2;
            stage.vcpu().set_sregs(&stage.sregs(0, roots[at])?)?;
            stage.expect(
                &format!("round {round}"),
                &[
                    (read(va + 8), value(tag(frames[at]))),
                    (write(va + 16, 1).user(), DONE),
                    (cr3(roots[1 - at]), DONE),
                    (fetch(va), value(tag(frames[1 - at]))),
                ],
            )?;
        }
        Ok(())
    })
}

fn kvm_set_sregs_changes_wp_smep_and_smap() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let frame = stage.frame();
        stage.map(va, 1, frame | PRESENT | USER);
        stage.map(va + PAGE, 1, frame | PRESENT);
        let number = value(tag(frame));
        for bits in [0, 1, 2, 4, 6, 3, 7, 5, 0, 7, 1, 6] {
            let (wp, smep, smap) = (bits & 1 != 0, bits & 2 != 0, bits & 4 != 0);
            if smap && !wp && !oracle::tdp() {
                // See `paging_protection`: a shadow that the kernel has written is the kernel's.
                continue;
            }
            let mut sregs = stage.sregs(0, stage.root)?;
            sregs.cr0 = if wp { CR0 } else { CR0 & !WP };
            sregs.cr4 |= if smep { SMEP } else { 0 } | if smap { SMAP } else { 0 };
            stage.vcpu().set_sregs(&sregs)?;
            let fetch_bit = if smep || paging.has_nx() { F } else { 0 };
            stage.expect(
                &format!("{bits:03b}"),
                &[
                    (read(va + 8), if smap { fault(P, va + 8) } else { number }),
                    (fetch(va), if smep { fault(P | fetch_bit, va) } else { number }),
                    (read(va + 8).user(), number),
                    (
                        write(va + PAGE + 16, 1),
                        if wp { fault(P | W, va + PAGE + 16) } else { DONE },
                    ),
                    (write(va + 24, 1), if wp || smap { fault(P | W, va + 24) } else { DONE }),
                    (write(va + 24, 1).with_ac(), if wp { fault(P | W, va + 24) } else { DONE }),
                    (write(va + 24, 1).user(), fault(P | W | U, va + 24)),
                ],
            )?;
        }
        Ok(())
    })
}

fn kvm_set_sregs_changes_nxe() -> Outcome {
    oracle::not_of_stock_shadow_paging("its pages do not know EFER.NXE")?;
    in_each_mode(|paging| {
        if !paging.has_nx() {
            return Ok(());
        }
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let frame = stage.frame();
        stage.map(va, 1, frame | ALL | NX);
        stage.map(va + PAGE, 1, frame | ALL);
        for round in 0..8 {
            let mut sregs = stage.sregs(0, stage.root)?;
            let with = round % 2 == 0;
            sregs.efer = if with { sregs.efer | NXE } else { sregs.efer & !NXE };
            stage.vcpu().set_sregs(&sregs)?;
            let number = value(tag(frame));
            stage.expect(
                &format!("round {round}"),
                &[
                    (read(va + 8), if with { number } else { fault(P | RSVD, va + 8) }),
                    (fetch(va), fault(if with { P | F } else { P | RSVD }, va)),
                    (fetch(va + PAGE), number),
                ],
            )?;
        }
        Ok(())
    })
}

/// The paging modes that this host's guests have, in an order that visits each from several others.
fn tour() -> Outcome<Vec<Paging>> {
    let modes = std::cell::RefCell::new(Vec::new());
    in_each_mode(|paging| {
        modes.borrow_mut().push(paging);
        Ok(())
    })?;
    let modes = modes.into_inner();
    Ok((0..4 * modes.len())
        .map(|step| modes[(step + step / modes.len() * step) % modes.len()])
        .collect())
}

fn kvm_set_sregs_turns_a_guest_into_another() -> Outcome {
    let mut stage = Stage::new(Paging::Four)?;
    let mut homes: Vec<(Paging, u64, u64)> = Vec::new();
    for paging in tour()? {
        let known = homes.iter().find(|home| home.0 == paging).copied();
        stage.paging = paging;
        let (_, root, frame) = known.unwrap_or_else(|| {
            let root = stage.new_root();
            let frame = stage.frame();
            stage.map_in(root, paging.at(), 1, frame | ALL);
            homes.push((paging, root, frame));
            (paging, root, frame)
        });
        stage.root = root;
        stage.become_a(paging, root)?;
        let va = paging.at();
        stage.expect(
            &format!("as {paging:?}"),
            &[
                (read(va + 8), value(tag(frame))),
                (write(va + 16, 1).user(), DONE),
                (fetch(va), value(tag(frame))),
                (read(va + PAGE), fault(0, va + PAGE)),
            ],
        )?;
    }
    Ok(())
}

fn a_frame_is_the_root_of_one_format_and_then_of_another() -> Outcome {
    // Four pages that in each mode's turn are root and tables, written by the guest itself from a root that stays.
    let mut stage = Stage::new(Paging::Four)?;
    let pages: Vec<u64> = (0..6).map(|_| stage.tables.page()).collect();
    let mut homes: Vec<(Paging, u64)> = Vec::new();
    for (step, paging) in tour()?.into_iter().enumerate() {
        stage.paging = paging;
        let home = homes.iter().find(|home| home.0 == paging).map(|home| home.1);
        let home = home.unwrap_or_else(|| {
            let root = stage.new_root();
            homes.push((paging, root));
            root
        });
        stage.root = home;
        stage.become_a(paging, home)?;
        let (va, frame) = (paging.at(), stage.frame());
        let page = |index: usize| pages[(index + step) % pages.len()];
        let mut expected: Vec<_> = pages.iter().map(|page| (fill(*page, 0), DONE)).collect();
        // The program's part of the map, shared with the home.
        let root = page(0);
        for index in 0..16 {
            let (at, bytes) = (index * paging.entry_bytes(), paging.entry_bytes());
            let entry = stage.entry(home + at);
            if entry != 0 && at + bytes <= PAGE && (paging != Paging::Pae || index == 0) {
                expected.push((stage.set_entry(root + at, entry), DONE));
            }
        }
        let mut table = root;
        for level in (2..=paging.levels()).rev() {
            let next = page((paging.levels() - level + 1) as usize);
            let at = table + paging.offset(va, level);
            expected.push((stage.set_entry(at, next | paging.table_flags(level)), DONE));
            table = next;
        }
        expected.extend([
            (stage.set_entry(table + paging.offset(va, 1), frame | ALL), DONE),
            (cr3(root), DONE),
            (read(va + 8), value(tag(frame))),
            (write(va + 16, 1).user(), DONE),
            (read(va + PAGE), fault(0, va + PAGE)),
            (cr3(home), DONE),
            (read(va + 8), fault(0, va + 8)),
        ]);
        stage.expect(&format!("step {step}, {paging:?}"), &expected)?;
    }
    Ok(())
}

fn a_guest_changes_between_legacy_and_pae_by_itself() -> Outcome {
    let mut stage = Stage::new(Paging::Legacy)?;
    let va = Paging::Legacy.at();
    let legacy_root = stage.root;
    let legacy_frame = stage.frame();
    stage.map(va, 1, legacy_frame | ALL);
    stage.paging = Paging::Pae;
    let pae_root = stage.new_root();
    let pae_frame = stage.frame();
    stage.map_in(pae_root, va, 1, pae_frame | ALL);
    stage.root = pae_root;
    let tops = stage.clean_tops();
    stage.paging = Paging::Legacy;
    let mut expected = Vec::new();
    for round in 0..10 {
        expected.extend([
            (read(va + 8), value(tag(legacy_frame))),
            (write(va + 16, round).user(), DONE),
            (cr0(CR0 & !PG), DONE),
            (read(pae_frame + 8), value(tag(pae_frame))),
        ]);
        expected.extend(tops.iter().map(|step| (*step, DONE)));
        expected.extend([
            (cr4(PSE | PAE), DONE),
            (cr3(pae_root), DONE),
            (cr0(CR0), DONE),
            (read(va + 8), value(tag(pae_frame))),
            (fetch(va).user(), value(tag(pae_frame))),
            (write(va + 16, round), DONE),
            (cr0(CR0 & !PG), DONE),
            (cr4(PSE), DONE),
            (cr3(legacy_root), DONE),
            (cr0(CR0), DONE),
            (read(va + 16), value(round)),
        ]);
    }
    stage.expect("to and fro", &expected)
}

fn a_table_frame_is_a_page_and_a_table_of_each_level() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        // A page full of entries that all lead to one frame: as a table of level 1 it maps that frame, as one of
        // level 2 it takes the frame for a table, and so on; and it is a page of its own.
        let (shared, target) = (stage.tables.page(), stage.tables.page());
        let frame = stage.frame();
        let bytes = paging.entry_bytes();
        for offset in (0..PAGE).step_by(bytes as usize) {
            paging.put(stage.memory(), shared + offset, target | ALL);
            paging.put(stage.memory(), target + offset, frame | ALL);
        }
        let span = paging.span(2);
        // As a table of level 1 the shared page maps the target page itself.
        let as_table = va + 7 * span;
        let link = stage.place_of(as_table, 2);
        paging.put(stage.memory(), link, shared | ALL);
        // As a page.
        let as_page = va;
        stage.map(as_page, 1, shared | ALL);
        // As a directory, where the format has a place for one.
        let as_directory = va + paging.span(3) % (1 << 32);
        if paging.is_wide() {
            let link = stage.place_of(as_directory, 3);
            paging.put(stage.memory(), link, shared | ALL);
        }
        let entry =
            |page: u64| (page | ALL) & if paging.is_wide() { u64::MAX } else { 0xffff_ffff };
        let second = stage.frame();
        for round in 0..6 {
            let shown = if round % 2 == 0 { frame } else { second };
            let mut expected = vec![
                // Through the table: the target's entries as data, where no bit was set.
                (write(as_table + 5 * PAGE + 100 * bytes, shown | ALL), DONE),
                (read(as_table + 9 * PAGE + 100 * bytes), value(entry(shown))),
            ];
            if paging.is_wide() {
                expected.extend([
                    (cr3(stage.root), DONE),
                    (read(as_directory + 100 * PAGE + 8), value(tag(shown))),
                    (write(as_directory + 3 * span + 100 * PAGE + 16, round).user(), DONE),
                ]);
            }
            expected.extend([
                // As a page: its entry of number 11 goes, and with it what that mapped.
                (stage.set_entry(as_page + 11 * bytes, 0), DONE),
                (cr3(stage.root), DONE),
                (read(as_table + 11 * PAGE), fault(0, as_table + 11 * PAGE)),
                (stage.set_entry(as_page + 11 * bytes, target | ALL), DONE),
                (write(as_table + 11 * PAGE + 100 * bytes, shown | ALL), DONE),
            ]);
            stage.expect(&format!("round {round}"), &expected)?;
        }
        Ok(())
    })
}

fn a_frame_of_a_large_page_is_a_table_too() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let large = stage.large_frame();
        let large_va = va + 9 * paging.span(2);
        stage.map(large_va, 2, large | ALL);
        let frames = [stage.frame(), stage.frame()];
        for page in [0, 1, 77] {
            let table = large + page * PAGE;
            let own = va + page * paging.span(2) / 77 * 3 / paging.span(2) * paging.span(2);
            let link = stage.place_of(own, 2);
            let offset = paging.offset(own, 1);
            let mut expected = vec![
                (fill(large_va + page * PAGE, 0), DONE),
                (stage.set_entry(link, table | ALL), DONE),
                (cr3(stage.root), DONE),
                (read(own + 8), fault(0, own + 8)),
            ];
            for round in 0..8 {
                let frame = frames[round % 2];
                expected.extend([
                    // The table changes through the large page.
                    (stage.set_entry(large_va + page * PAGE + offset, frame | ALL), DONE),
                    (invlpg(own), DONE),
                    (read(own + 8), value(tag(frame))),
                    (write(own + 16, 1).user(), DONE),
                    (write(large_va + (page + 2) * PAGE + 16, round as u64).user(), DONE),
                    (read(large_va + (page + 2) * PAGE + 16), value(round as u64)),
                    (read(large_va + 200 * PAGE + 8), value(tag(large + 200 * PAGE))),
                ]);
            }
            stage.expect(&format!("page {page}"), &expected)?;
        }
        Ok(())
    })
}

fn a_large_page_and_a_table_begin_at_the_same_frame() -> Outcome {
    in_each_mode(|paging| {
        for large_first in [true, false] {
            let (mut stage, va) = (Stage::new(paging)?, paging.at());
            let large = stage.large_frame();
            let (large_va, frame) = (va + 9 * paging.span(2), stage.frame());
            // The large frame's first page is a table, whose entries must not be taken for the pages of the large
            // one, nor the other way about.
            (0..PAGE).step_by(8).for_each(|at| stage.memory().write(large + at, 0));
            paging.put(stage.memory(), large + paging.offset(va, 1), frame | ALL);
            let link = stage.place_of(va, 2);
            paging.put(stage.memory(), link, large | ALL);
            stage.map(large_va, 2, large | ALL);
            let as_large = [
                (read(large_va + 3 * PAGE + 8), value(tag(large + 3 * PAGE))),
                (write(large_va + 4 * PAGE + 16, 1), DONE),
            ];
            let as_table = [
                (read(va + 8), value(tag(frame))),
                (read(va + 3 * PAGE + 8), fault(0, va + 3 * PAGE + 8)),
                (write(va + 16, 1).user(), DONE),
            ];
            let mut expected = Vec::new();
            for round in 0..4 {
                match large_first == (round % 2 == 0) {
                    true => expected.extend(as_large.iter().chain(&as_table).copied()),
                    false => expected.extend(as_table.iter().chain(&as_large).copied()),
                }
                expected.push((cr3(stage.root), DONE));
            }
            stage.expect("one frame", &expected)?;
        }
        Ok(())
    })
}

fn a_large_page_with_two_permissions() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let large = stage.large_frame();
        let nx = if paging.has_nx() { NX } else { 0 };
        let addresses = [0, 3, 6, 9].map(|index| va + index * paging.span(2));
        let flags = [ALL, PRESENT | USER, PRESENT | WRITABLE, PRESENT | nx];
        for (at, flags) in addresses.iter().zip(flags) {
            stage.map(*at, 2, large | flags);
        }
        let page = 5 * PAGE;
        let number = value(tag(large + page));
        let [all, read_only, kernels, data] = addresses.map(|at| at + page);
        let mut expected = Vec::new();
        for round in 0..6 {
            expected.extend([
                (write(all + 16, round).user(), DONE),
                (write(read_only + 16, 9), fault(P | W, read_only + 16)),
                (read(read_only + 16).user(), value(round)),
                (write(kernels + 24, round), DONE),
                (read(kernels + 24).user(), fault(P | U, kernels + 24)),
                (read(data + 24), value(round)),
                (write(data + 24, 9), fault(P | W, data + 24)),
                (fetch(all), number),
                (fetch(data), if nx != 0 { fault(P | F, data) } else { number }),
                (write(read_only + 16, 9).user(), fault(P | W | U, read_only + 16)),
            ]);
        }
        stage.expect("four addresses", &expected)
    })
}

fn a_quarter_of_a_legacy_directory_is_not_another() -> Outcome {
    let mut stage = Stage::new(Paging::Legacy)?;
    // Addresses in all four quarters of the directory and both halves of a table.
    let mut expected = Vec::new();
    for quarter in 0..4_u64 {
        for half in 0..2_u64 {
            let va = (quarter << 30) + (0x30 << 22) + (half << 21) + 7 * PAGE;
            let frame = stage.frame();
            stage.map(va, 1, frame | ALL);
            let large = (quarter << 30) + (0x40 << 22);
            expected.extend([
                (read(va + 8), value(tag(frame))),
                (write(va + 16, quarter).user(), DONE),
                (read(va + PAGE), fault(0, va + PAGE)),
                (read(large), fault(0, large)),
            ]);
        }
    }
    stage.expect("quarters", &expected)?;
    // One table for all of them: the same entries at eight addresses.
    let table = stage.entry(stage.tree().entry((0x30 << 22) + 7 * PAGE, 2)?);
    let mut expected = Vec::new();
    let (low, high) = (
        stage.tree().entry((0x30 << 22) + 7 * PAGE, 1)?,
        stage.tree().entry((0x30 << 22) + (1 << 21) + 7 * PAGE, 1)?,
    );
    let frames =
        [Paging::Legacy.target(stage.entry(low)), Paging::Legacy.target(stage.entry(high))];
    for quarter in 1..4_u64 {
        let link = stage.place_of((quarter << 30) + (0x30 << 22), 2);
        expected.push((write(link, table), DONE));
    }
    expected.push((cr3(stage.root), DONE));
    for quarter in 0..4_u64 {
        for half in 0..2_u64 {
            let va = (quarter << 30) + (0x30 << 22) + (half << 21) + 7 * PAGE;
            expected.push((fetch(va).user(), value(tag(frames[half as usize]))));
        }
    }
    stage.expect("one table", &expected)
}

fn the_same_table_with_and_without_execution() -> Outcome {
    in_each_mode(|paging| {
        if !paging.has_nx() {
            return Ok(());
        }
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let frame = stage.frame();
        stage.map(va, 1, frame | ALL);
        let directory = stage.entry(stage.tree().entry(va, 2)?);
        let flags = [NX, 0, NX, 0];
        let addresses: Vec<u64> = (1..5).map(|index| va + index * 3 * paging.span(2)).collect();
        for (at, flags) in addresses.iter().zip(flags) {
            let link = stage.place_of(*at, 2);
            paging.put(stage.memory(), link, directory & !USER | flags);
        }
        let mut expected = Vec::new();
        for round in 0..5 {
            expected.push((fetch(va).user(), value(tag(frame))));
            for (at, flags) in addresses.iter().zip(flags) {
                expected.push((write(at + 16, round), DONE));
                let number = value(tag(frame));
                expected.push((fetch(*at), if flags == 0 { number } else { fault(P | F, *at) }));
                expected.push((read(at + 8).user(), fault(P | U, at + 8)));
            }
        }
        stage.expect("five addresses", &expected)
    })
}

fn kvm_set_cpuid2_again_changes_nothing() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let frame = stage.frame();
        let at = stage.map(va, 1, frame | PRESENT | USER);
        let mut table = CpuidTable::empty();
        stage.vcpu().exchange(ioctl::GET_CPUID2, &mut *table).granted("KVM_GET_CPUID2")?;
        for round in 0..4 {
            stage.expect(
                &format!("round {round}"),
                &[
                    (read(va + 8), value(tag(frame))),
                    (write(va + 16, 1), fault(P | W, va + 16)),
                    (stage.set_entry(at, frame | ALL), DONE),
                    (invlpg(va), DONE),
                    (write(va + 16, 1).user(), DONE),
                    (stage.set_entry(at, frame | PRESENT | USER), DONE),
                    (invlpg(va), DONE),
                ],
            )?;
            if stage.vcpu().set_cpuid(&table).is_err()
                && oracle::is_stock()
                && oracle::kernel() < (6, 12)
            {
                return skip("this version of the stock module refuses the table that it gave");
            }
            stage.vcpu().set_cpuid(&table)?;
        }
        Ok(())
    })
}

/// A stage whose vCPU has a CPUID table that `change` made.
fn with_cpuid(paging: Paging, change: impl Fn(&mut kvm_cpuid_entry2)) -> Outcome<Stage> {
    let stage = Stage::new(paging)?;
    let mut table = CpuidTable::empty();
    stage.vcpu().exchange(ioctl::GET_CPUID2, &mut *table).granted("KVM_GET_CPUID2")?;
    table.used().iter_mut().for_each(change);
    stage.vcpu().set_cpuid(&table)?;
    Ok(stage)
}

fn a_narrow_physical_address_makes_bits_reserved() -> Outcome {
    if oracle::tdp() {
        return skip("under TDP the processor's own width counts");
    }
    in_each_mode(|paging| {
        if !paging.has_nx() {
            return Ok(());
        }
        for width in [36, 38] {
            let mut stage = with_cpuid(paging, |entry| {
                if entry.function == 0x8000_0008 {
                    entry.eax = entry.eax & !0xff | width;
                }
            })?;
            let va = paging.at();
            let frame = stage.frame();
            let at = stage.map(va, 1, frame | ALL);
            let directory = stage.tree().entry(va, 2)?;
            let entry = stage.entry(directory);
            stage.expect(
                &format!("{width} bits"),
                &[
                    (read(va + 8), value(tag(frame))),
                    (stage.set_entry(at, frame | ALL | 1 << width), DONE),
                    (invlpg(va), DONE),
                    (read(va + 8), fault(P | RSVD, va + 8)),
                    (stage.set_entry(at, frame | ALL), DONE),
                    (stage.set_entry(directory, entry | 1 << width), DONE),
                    (invlpg(va), DONE),
                    (write(va + 16, 1).user(), fault(P | RSVD | W | U, va + 16)),
                    (stage.set_entry(directory, entry), DONE),
                    (invlpg(va), DONE),
                    (write(va + 16, 1).user(), DONE),
                ],
            )?;
        }
        Ok(())
    })
}

fn has_gigabyte_pages(stage: &Stage) -> Outcome<bool> {
    let mut table = stage.guest.system.supported_cpuid()?;
    Ok(table.find(0x8000_0001, 0).is_some_and(|leaf| leaf.edx >> 26 & 1 != 0))
}

fn without_gigabyte_pages_their_bit_is_reserved() -> Outcome {
    if oracle::tdp() {
        return skip("under TDP the processor's own pages count");
    }
    in_each_wide_mode(|paging| {
        let mut stage = with_cpuid(paging, |entry| {
            if entry.function == 0x8000_0001 {
                entry.edx &= !(1 << 26);
            }
        })?;
        let va = paging.at();
        stage.map(va, 3, ALL);
        stage.expect("a gigabyte", &[(read(va + 8), fault(P | RSVD, va + 8))])
    })
}

fn a_gigabyte_page_is_one_page() -> Outcome {
    in_each_wide_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        if !has_gigabyte_pages(&stage)? {
            return skip("no pages of 1 GiB");
        }
        let frame = stage.frame();
        let at = stage.map(va, 3, ALL);
        let entry = stage.entry(at);
        let other = va + 4 * paging.span(3);
        stage.map(other, 3, PRESENT);
        stage.expect(
            "a gigabyte",
            &[
                (read(va + frame + 8), value(tag(frame))),
                (write(va + frame + 16, 1).user(), DONE),
                (read(other + frame + 16), value(1)),
                (write(other + frame + 16, 1), fault(P | W, other + frame + 16)),
                (fetch(va + frame), value(tag(frame))),
                (stage.set_entry(at, entry & !WRITABLE | ACCESSED), DONE),
                (invlpg(va + 77 * PAGE), DONE),
                (write(va + frame + 16, 1), fault(P | W, va + frame + 16)),
                // Bits below its address are reserved.
                (stage.set_entry(at, entry | 1 << 21), DONE),
                (invlpg(va), DONE),
                (read(va + frame), fault(P | RSVD, va + frame)),
            ],
        )
    })
}

fn without_nx_in_cpuid_there_is_no_nxe() -> Outcome {
    let stage = with_cpuid(Paging::Pae, |entry| {
        if entry.function == 0x8000_0001 {
            entry.edx &= !(1 << 20);
        }
    })?;
    let mut sregs = stage.sregs(0, stage.root)?;
    sregs.efer = 0;
    stage.vcpu().set_sregs(&sregs)?;
    stage.expect("NXE", &[(efer(NXE), Seen::Exception { vector: 13, error: 0 }), (efer(0), DONE)])
}

fn init_forgets_the_paging_mode() -> Outcome {
    in_each_mode(|paging| {
        let mut stage = Stage::with_vcpus(paging, 2)?;
        let va = paging.at();
        let frame = stage.frame();
        stage.map(va, 1, frame | ALL);
        for round in 0..3 {
            stage.start(0, stage.root)?;
            stage.expect(
                "before",
                &[(read(va + 8), value(tag(frame))), (write(va + 16, round), DONE)],
            )?;
            stage.start(1, stage.root)?;
            stage.load(1, &[send_init(0)]);
            let exit = stage.guest.vcpus[1].run().granted("KVM_RUN")?;
            holds("the end of the second", exit.is_out(PORT_DONE), &exit)?;
            // The first vCPU starts at the reset vector, where nothing is.
            let exit = stage.vcpu().run().granted("KVM_RUN")?;
            let regs = stage.vcpu().regs()?;
            equal(&format!("rip after {exit:x?}"), regs.rip, 0xfff0)?;
            equal("paging", stage.vcpu().sregs()?.cr0 & PG, 0)?;
        }
        stage.start(0, stage.root)?;
        stage.expect("after", &[(read(va + 16), value(2)), (fetch(va).user(), value(tag(frame)))])
    })
}

fn a_vcpu_reset_by_the_vmm_starts_from_nothing() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let fresh = {
            let other = System::open()?.create_vm()?;
            other.create_vcpu(0)?.sregs()?
        };
        let frames = [stage.frame(), stage.frame()];
        let at = stage.map(va, 1, frames[0] | ALL);
        // Code for real mode: the page's own physical address, without any translation.
        let code = [0xa0_u8, 0x08, 0x00, 0xe6, 0xf6, 0xeb, 0xfc];
        for round in 0..6 {
            let (shown, next) = (frames[round % 2], frames[(round + 1) % 2]);
            stage.expect(
                &format!("round {round}"),
                &[
                    (read(va + 8), value(tag(shown))),
                    (write(va + 16, 1).user(), DONE),
                    // For after the reset.
                    (stage.set_entry(at, next | ALL), DONE),
                ],
            )?;
            stage.vcpu().set_sregs(&fresh)?;
            let mut real = fresh;
            (real.cs.base, real.cs.selector) = (0x3_2000, 0x3200);
            (real.ds.base, real.ds.selector) = (0x3_3000, 0x3300);
            stage.memory().write_bytes(0x3_2000, &code);
            stage.memory().write(0x3_3008, 0x42 + round as u64);
            stage.vcpu().set_sregs(&real)?;
            stage.vcpu().set_regs(&kvm_regs { rflags: 2, ..Default::default() })?;
            let exit = stage.vcpu().run().granted("KVM_RUN")?;
            let byte = match &exit {
                Exit::Io { data, .. } => data.first().copied(),
                _ => None,
            };
            holds("a byte of physical memory", byte == Some(0x42 + round as u8), &exit)?;
            stage.start(0, stage.root)?;
        }
        Ok(())
    })
}

fn toggles_around_a_slot_change() -> Outcome {
    in_each_mode(|paging| {
        let (mut stage, va) = (Stage::new(paging)?, paging.at());
        let at = stage.place_of(va, 1);
        const ELSEWHERE: u64 = 0x1000_0000;
        let memories = [Memory::new(PAGE)?, Memory::new(PAGE)?];
        let place = |index: usize| {
            let memory = &memories[index];
            stage.guest.vm.set_slot(1, 0, ELSEWHERE, PAGE, memory.hva()).granted("slot").map(drop)
        };
        for (index, memory) in memories.iter().enumerate() {
            mark(memory, 0, index as u64);
        }
        place(0)?;
        let mut expected = Vec::new();
        for round in 0..6 {
            let number = round % 2;
            expected.push((cr0(CR0 & !WP), DONE));
            expected.push((read(va + 8), value(number)));
            expected.push((stage.switch_cr4(stage.cr4() | SMEP), DONE));
            expected.push((write(va + 16, 1), DONE));
            expected.push((MARK, DONE));
            expected.push((read(va + 8), value(1 - number)));
            expected.push((cr0(CR0), DONE));
            expected.push((read(va + 8).user(), value(1 - number)));
            expected.push((write(va + 16, 1), fault(P | W, va + 16)));
            expected.push((stage.switch_cr4(stage.cr4()), DONE));
            expected.push((fetch(va), value(1 - number)));
        }
        let delete = || stage.guest.vm.set_slot(1, 0, ELSEWHERE, 0, 0).granted("delete").map(drop);
        let entry = ELSEWHERE | PRESENT | USER;
        paging.put(stage.memory(), at, entry);
        stage.expect_with("toggles", &expected, |round| {
            delete()?;
            place((round as usize + 1) % 2)
        })
    })
}

fn two_vcpus_with_different_control_bits_share_tables() -> Outcome {
    in_each_mode(|paging| {
        let mut stage = Stage::with_vcpus(paging, 2)?;
        let va = paging.at();
        let frame = stage.frame();
        stage.map(va, 1, frame | PRESENT | USER);
        stage.map(va + PAGE, 1, frame | PRESENT);
        let number = value(tag(frame));
        // The first with WP and SMEP, the second without.
        let mut sregs = stage.sregs(1, stage.root)?;
        sregs.cr0 &= !WP;
        stage.guest.vcpus[1].set_sregs(&sregs)?;
        let mut sregs = stage.sregs(0, stage.root)?;
        sregs.cr4 |= SMEP;
        stage.vcpu().set_sregs(&sregs)?;
        for round in 0..6 {
            stage.expect(
                "the first",
                &[
                    (read(va + 8), number),
                    (write(va + 16, 1), fault(P | W, va + 16)),
                    (write(va + PAGE + 16, 1), fault(P | W, va + PAGE + 16)),
                    (fetch(va), fault(P | F, va)),
                    (fetch(va).user(), number),
                    (fetch(va + PAGE), number),
                ],
            )?;
            let list = [
                write(va + 16, round),
                write(va + PAGE + 24, round),
                fetch(va),
                read(va + 16).user(),
                write(va + 16, 1).user(),
            ];
            stage.load(1, &list);
            let exit = stage.guest.vcpus[1].run().granted("KVM_RUN")?;
            holds("the end", exit.is_out(PORT_DONE), &exit)?;
            let expected = vec![DONE, DONE, number, value(round), fault(P | W | U, va + 16)];
            equal("the second", stage.seen(1, list.len()), expected)?;
        }
        Ok(())
    })
}
