//! What a stage costs: `compute` in seconds, `memory` in bytes, and `network` what transfers and sums take on a cluster.

pub mod compute;
pub mod memory;
pub mod network;

pub use compute::{Model, SyncTail, Totals, sync_s};
pub use memory::{Memory, MemoryModel, memory};
