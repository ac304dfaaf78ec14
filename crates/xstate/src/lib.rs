//! The XSAVE area: where each state component lies, how large an area a set of components needs,
//! and which sets of components XCR0 may hold.
//!
//! CPUID leaf 0xD is read once, at load ([`Layout::read`]); everything after that is arithmetic
//! over the table. SDM vol. 1 ch. 13, APM vol. 2 §11.5.
#![no_std]
#![forbid(unsafe_code)]

mod layout;
mod rules;

pub use layout::{Component, Form, LEGACY_AND_HEADER, Layout};
pub use rules::{SUPPORTED_XCR0, Xcr0Fault, supported_xcr0, xcr0_check, xcr0_valid};
