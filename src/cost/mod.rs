//! What a stage costs: `compute` in seconds, `memory` in bytes, `network` what transfers and sums take on a cluster, and
//! `ties` what weights that stages share add.

pub mod compute;
pub mod memory;
pub mod network;
pub mod ties;

pub use compute::{Interpolation, Model, SyncTail, Totals, sync_s, sync_without_s};
pub use memory::{Memory, MemoryModel, memory};
pub use ties::shared;
