//! Decides who computes what.

pub mod chain;
