//! System-management mode of a guest that is a hypervisor: an SMI while its guest runs, and RSM (APM vol. 2 §10.3,
//! SDM vol. 3C §32.14).

use crate::kvm::exit::Exit;
use crate::machine::code::guest_code;
use crate::machine::guest::Guest;
use crate::machine::layout::PORT_MARK;
use crate::machine::saved::{Saved, nested};
use crate::machine::smram::{SMRAM_BYTES, SmmGuest, in_smm};
use crate::oracle;
use crate::outcome::{Outcome, equal, fail, skip};
use crate::runner::tests;

use super::{
    nested_state::{computes, hypervisor, hypervisor_with_tables, in_l2, is_amd, rewind},
    nested_svm,
};

tests!("nested_smm":
    an_smi_that_l1_does_not_intercept_is_taken_in_l2s_time,
    it_is_so_with_tables_of_l1s,
    a_vcpu_moves_within_the_mode_that_l2_was_left_for,
    an_smi_of_l1_leaves_its_operation_as_it_is,
    rsm_into_an_l2_without_a_task_register_is_a_shutdown,
);

guest_code!(
    handler,
    16,
    "mov $0x55, %al",
    "out %al, $PORT_MARK",
    "mov $0x55, %al",
    "out %al, $PORT_MARK",
    "rsm"
);

const IN_HANDLER: u8 = 0x55;
/// What L1's block says of an end of L2's run that no CPU makes.
const EXIT_SOFTWARE: u64 = 0xf000_0000;
const GUEST_MODE: u16 = 1;

/// The next exit is a mark of the handler's.
fn in_handler(guest: &Guest) -> Outcome {
    match guest.exit()? {
        Exit::Io { write: true, port: PORT_MARK, data, .. } if data == [IN_HANDLER] => {
            equal("KVM_RUN_X86_SMM", in_smm(guest.vcpu()), true)
        }
        exit => fail(format!("expected the handler, got {exit:x?}")),
    }
}

fn interrupted(make: fn() -> Outcome<Guest>) -> Outcome {
    let smm = SmmGuest::over(make()?, handler())?;
    let guest = &smm.guest;
    // The second run: L1 has heard of an exit before.
    computes(guest, 1)?;
    rewind(guest);
    in_l2(guest, 3)?;
    for number in 4..7 {
        let before = guest.vcpu().sregs()?;
        smm.smi()?;
        in_handler(guest)?;
        equal("L2 runs", nested(guest.vcpu())?.flags() & GUEST_MODE, 0)?;
        if is_amd() {
            let told = guest.memory.read(nested_svm::BLOCK + 0x70);
            equal("what L1's block tells", told, EXIT_SOFTWARE)?;
            let kept = (smm.saved(0xfed8), smm.saved(0xfee0));
            equal("the save area", kept, (1, nested_svm::BLOCK))?;
        }
        in_handler(guest)?;
        guest.reach_mark()?;
        equal("KVM_RUN_X86_SMM", in_smm(guest.vcpu()), false)?;
        equal("system registers", guest.vcpu().sregs()?, before)?;
        equal("the sum", guest.result(8), number * (number + 1) / 2)?;
    }
    computes(guest, 7)
}

fn an_smi_that_l1_does_not_intercept_is_taken_in_l2s_time() -> Outcome {
    interrupted(hypervisor)
}

fn it_is_so_with_tables_of_l1s() -> Outcome {
    interrupted(hypervisor_with_tables)
}

fn moves(make: fn() -> Outcome<Guest>) -> Outcome {
    let smm = SmmGuest::over(make()?, handler())?;
    computes(&smm.guest, 1)?;
    rewind(&smm.guest);
    in_l2(&smm.guest, 3)?;
    smm.smi()?;
    in_handler(&smm.guest)?;
    let saved = Saved::of(&smm.guest)?;
    // On Intel the nested state says what the mode has put aside: the vCPU has to be in it.
    let restored = saved.restored_in(&[0, 2, 3, 4, 5, 6, 7, 1, 8], false)?;
    let other = SmmGuest::over(restored, handler())?;
    other.smram.write_bytes(0, &smm.smram.read_bytes(0, SMRAM_BYTES as usize));
    for smm in [&other, &smm] {
        in_handler(&smm.guest)?;
        smm.guest.reach_mark()?;
        equal("the sum", smm.guest.result(8), 10)?;
        computes(&smm.guest, 5)?;
    }
    Ok(())
}

fn a_vcpu_moves_within_the_mode_that_l2_was_left_for() -> Outcome {
    moves(hypervisor)?;
    moves(hypervisor_with_tables)
}

fn an_smi_of_l1_leaves_its_operation_as_it_is() -> Outcome {
    let smm = SmmGuest::over(hypervisor()?, handler())?;
    let guest = &smm.guest;
    computes(guest, 1)?;
    // L1 is at its own mark.
    rewind(guest);
    smm.smi()?;
    in_handler(guest)?;
    in_handler(guest)?;
    computes(guest, 1)
}

fn rsm_into_an_l2_without_a_task_register_is_a_shutdown() -> Outcome {
    if is_amd() {
        return skip("VMRUN asks nothing of TR");
    }
    if oracle::is_stock() && oracle::kernel() < (7, 0) {
        return skip("stock KVM before 7.0 ends L2's run instead");
    }
    // The attributes lie between the selector and the limit; P is bit 7.
    const TR: u64 = 0xfe90;
    const PRESENT: u64 = 1 << 23;
    let smm = SmmGuest::over(hypervisor()?, handler())?;
    let guest = &smm.guest;
    computes(guest, 1)?;
    rewind(guest);
    in_l2(guest, 3)?;
    smm.smi()?;
    in_handler(guest)?;
    smm.smram.write(TR, smm.saved(TR) & !PRESENT);
    in_handler(guest)?;
    equal("RSM", guest.exit()?, Exit::Shutdown)?;
    equal("L2 runs", nested(guest.vcpu())?.flags() & GUEST_MODE, 0)
}
