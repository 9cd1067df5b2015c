//! Planners: `hybrid` plans training with pipelines and data parallelism, `action_lists` plans it for schedules that
//! are lists of actions, `chain` partitions models over uneven hosts, and `legacy` reproduces the original HPGO
//! planner. `shares_by_speed` adds plans whose replicas get samples by their speed.

pub mod action_lists;
pub mod chain;
mod effort;
pub mod hybrid;
pub mod legacy;
pub mod shares_by_speed;

#[cfg(test)]
mod random_problems;
#[cfg(test)]
mod simulator_tests;
