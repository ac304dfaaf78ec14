#[test]
fn sizes() {
    use gannet_kvm_abi::bind::*;
    type S = svm::Svm<cpu::Native>;
    eprintln!("svm {} vcpu {} bound {} file {} events {} tablecache {} open {} fpu {} shared {} lapic {} vm {} vmmem {} vmirq {} sregs {}", size_of::<S>(), size_of::<vcpu::Vcpu<S>>(), size_of::<BoundVcpu<S>>(), size_of::<VcpuFile<S>>(), size_of::<vcpu::events::Events>(), size_of::<mmu::TableCache>(), size_of::<vcpu::run::Open>(), size_of::<host::fpu::GuestFpu>(), size_of::<vm::vcpu_shared::VcpuShared>(), size_of::<irqchip::Lapic>(), size_of::<vm::Vm>(), size_of::<vm::memory::VmMemory>(), size_of::<vm::irq::VmIrq>(), size_of::<vcpu::Sregs>());
    eprintln!("pv {} facts {} clock {} irqcore {}", size_of::<vcpu::pv::PvState>(), size_of::<msr::GuestFacts>(), size_of::<vcpu::lapic::LoopClock>(), size_of::<vm::irq::IrqCore>());
}
