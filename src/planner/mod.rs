//! Decides who computes what.

pub mod chain;
mod effort;
pub mod hybrid;
pub mod legacy;
pub mod orders;

#[cfg(test)]
mod random_problems;
#[cfg(test)]
mod simulator_tests;
