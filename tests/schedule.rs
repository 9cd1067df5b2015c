//! Orders, without a clock: what the families promise, through the public API.

use hpgo::schedule::{Request, build, one_f_one_b};
use proptest::prelude::*;

fn text(order: &[hpgo::schedule::Action]) -> String {
    order.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
}

#[test]
fn one_f_one_b_alternates_after_its_warm_up() {
    let schedule = build("1f1b", &Request::new(2, 3)).unwrap();
    assert_eq!(text(&schedule.orders[0]), "0F0 0F1 0B0 0F2 0B1 0B2");
    assert_eq!(text(&schedule.orders[1]), "1F0 1B0 1F1 1B1 1F2 1B2");
}

#[test]
fn gpipe_runs_all_forwards_first() {
    let schedule = build("gpipe", &Request::new(2, 2)).unwrap();
    assert_eq!(text(&schedule.orders[1]), "1F0 1F1 1B0 1B1");
}

#[test]
fn sizes_beyond_the_limit_are_refused_with_the_size() {
    let error = build("gpipe", &Request::new(1 << 16, 1 << 16)).unwrap_err().to_string();
    assert!(error.contains("8589934592 actions"), "{error}");
}

proptest! {
    #[test]
    fn a_window_is_the_number_of_activations_held(windows in prop::collection::vec(1_u32..9, 1..9), more in 0_u32..9) {
        let micro_batches = windows.iter().max().unwrap() + more;
        let schedule = one_f_one_b(&windows, micro_batches);
        prop_assert_eq!(schedule.peak_in_flight(), windows);
    }
}
