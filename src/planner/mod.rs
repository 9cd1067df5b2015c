//! Decides who computes what.

pub mod chain;
pub mod hybrid;
pub mod legacy;
pub mod orders;
