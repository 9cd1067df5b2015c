//! Decides who computes what.

pub mod chain;
pub mod legacy;
