//! Decides who computes what.

pub mod chain;
pub mod chunked;
pub mod hybrid;
pub mod legacy;
