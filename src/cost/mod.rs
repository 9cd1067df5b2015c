//! What a stage costs: `layer_sums` and `grad_reduce` in seconds, `memory` in bytes, `network` what transfers and sums take on a cluster, and
//! `tied_weights` what weights that stages share add.

pub mod grad_reduce;
pub mod layer_sums;
pub mod memory;
pub mod nesting;
pub mod network;
pub mod tied_weights;

pub use grad_reduce::{SyncTail, grad_reduce_s, sync_without_s};
pub use layer_sums::{Interpolation, LayerSums, Totals};
pub use memory::{Memory, MemoryModel, memory};
pub use tied_weights::shared;
