//! Orders, without a clock: what the table of families promises, through the public API.

use hpgo::schedule::{
    Action, Durations, FAMILIES, Family, Kind, MAX_ACTIONS, Request, Schedule, Synchronization, Uniform, VirtualStages,
    build, family, one_f_one_b,
};
use hpgo::simulate::{Costs, Links, StageTimes, Sweep};
use proptest::prelude::*;

fn text(order: &[Action]) -> String {
    order.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
}

#[test]
fn one_f_one_b_alternates_after_its_warm_up() {
    let schedule = build("1f1b", &Request::new(2, 3)).unwrap();
    assert_eq!(text(&schedule.action_lists[0]), "0F0 0F1 0B0 0F2 0B1 0B2");
    assert_eq!(text(&schedule.action_lists[1]), "1F0 1B0 1F1 1B1 1F2 1B2");
}

#[test]
fn gpipe_runs_all_forwards_first() {
    let schedule = build("gpipe", &Request::new(2, 2)).unwrap();
    assert_eq!(text(&schedule.action_lists[1]), "1F0 1F1 1B0 1B1");
}

#[test]
fn sizes_beyond_the_limit_are_refused_with_the_size() {
    for family in FAMILIES {
        let error = family.build(&Request::new(1 << 16, 1 << 17)).unwrap_err().to_string();
        assert!(error.contains("has") && error.contains("actions"), "{error}");
    }
    let max = u32::try_from(MAX_ACTIONS).unwrap();
    assert!(build("gpipe", &Request::new(1, max / 2 + 1)).unwrap_err().to_string().contains("200000002 actions"));
    assert!(build("gpipe", &Request::new(u32::MAX, u32::MAX)).is_err());
}

#[test]
fn an_unknown_name_suggests_near_ones() {
    let hint = build("1F1B-eager", &Request::new(2, 2)).unwrap_err().hint().to_owned();
    assert!(hint.contains("hpgo schedules"), "{hint}");
    let hint = build("zbv", &Request::new(2, 2)).unwrap_err().hint().to_owned();
    assert!(hint.starts_with("did you mean `zb_v`"), "{hint}");
}

#[test]
fn limits_are_named() {
    let cases = [
        ("dualpipe", Request::new(4, 6), "M even and at least 2 p"),
        ("dualpipe", Request::new(3, 8), "p even"),
        ("dualpipe_v", Request::new(4, 7), "M at least 2 p"),
        ("chimera", Request::new(4, 6), "M a multiple of p"),
        ("interleaved", Request { group_size: Some(3), ..Request::new(3, 4) }, "M a multiple of g"),
        ("gpipe", Request { activation_limit: Some(3), ..Request::new(3, 4) }, "leave it out"),
        (
            "gpipe",
            Request { virtual_stages_per_rank: Some(2), ..Request::new(3, 4) },
            "leave `virtual_stages_per_rank` out",
        ),
        ("gpipe", Request::new(0, 4), "at least 1"),
        ("1f1b", Request { max_in_flight: Some(vec![1, 2]), ..Request::new(2, 4) }, "shrink"),
        ("1f1b", Request { max_in_flight: Some(vec![1]), ..Request::new(2, 4) }, "each rank"),
    ];
    for (name, request, hint) in cases {
        let error = build(name, &request).unwrap_err();
        assert!(error.hint().contains(hint), "{name}: {error} / {}", error.hint());
    }
}

/// A request that the family accepts, from any three numbers.
fn acceptable(family: &Family, ranks: u32, micro_batches: u32, virtual_stages_per_rank: u32) -> Request {
    let ranks = if family.limits.contains("p even") { ranks.next_multiple_of(2) } else { ranks };
    let micro_batches = match family.name {
        "dualpipe" => 2 * ranks + 2 * micro_batches,
        "dualpipe_v" => 2 * ranks + micro_batches,
        "chimera" => ranks * (1 + micro_batches / 4),
        _ => 1 + micro_batches,
    };
    let virtual_stages_per_rank = match family.virtual_stages_per_rank {
        VirtualStages::Exactly(_) => None,
        VirtualStages::Several => Some(1 + virtual_stages_per_rank),
        VirtualStages::Even => Some(2 * virtual_stages_per_rank),
    };
    Request { virtual_stages_per_rank, ..Request::new(ranks, micro_batches) }
}

fn any_request() -> impl Strategy<Value = (Family, Request)> {
    (prop::sample::select(FAMILIES), 1_u32..9, 0_u32..33, 1_u32..4)
        .prop_map(|(family, p, m, v)| (family, acceptable(&family, p, m, v)))
}

fn uniform_costs(schedule: &Schedule, uniform: Uniform) -> Costs {
    let times = StageTimes {
        forward_s: uniform.forward_s,
        backward_s: uniform.backward_s(),
        input_gradient_s: uniform.input_gradient_s,
        weight_gradient_s: uniform.weight_gradient_s,
        overlapped_s: Some(uniform.overlapped_s),
    };
    Costs::of_stages(vec![times; schedule.rank_of_stage.len()])
}

/// Seconds from start to end that the last rank is not busy. Only fused pairs make ranks differ in their work.
fn simulated_bubble_s(schedule: &Schedule, uniform: Uniform) -> f64 {
    let last = schedule.action_lists.last().expect("a schedule has ranks");
    let busy_s: f64 = last
        .iter()
        .map(|action| match action.kind {
            Kind::Forward => uniform.forward_s,
            Kind::Backward => uniform.backward_s(),
            Kind::InputGradient => uniform.input_gradient_s,
            Kind::WeightGradient => uniform.weight_gradient_s,
            Kind::Overlapped => uniform.overlapped_s,
        })
        .sum();
    Sweep::default().step_s(schedule, &uniform_costs(schedule, uniform), Links::Free).expect("valid") - busy_s
}

/// Equal F, I and W: every closed form is meant for these at least.
const EQUAL: Uniform = Uniform { forward_s: 1.0, input_gradient_s: 1.0, weight_gradient_s: 1.0, overlapped_s: 3.0 };

#[test]
fn bubbles_are_those_of_the_closed_forms() {
    let mut compared = 0;
    for family in FAMILIES {
        for (ranks, rounds) in [(1, 1), (2, 1), (2, 3), (4, 2), (4, 5), (6, 3), (8, 4)] {
            let ranks = if family.limits.contains("p even") { ranks + ranks % 2 } else { ranks };
            let request = Request::new(ranks, 2 * ranks * rounds);
            let schedule = family.build(&request).unwrap();
            let sizes = family.sizes(&request).unwrap();
            for uniform in [EQUAL, Uniform { forward_s: 2.0, input_gradient_s: 3.0, overlapped_s: 5.5, ..EQUAL }] {
                // Zero-bubble orders are laid out for equal F, I and W, and leave other gaps if they differ.
                if family.splits_backward && uniform != EQUAL {
                    continue;
                }
                let Some(expected) = family.bubble_s(sizes, uniform) else { continue };
                let simulated = simulated_bubble_s(&schedule, uniform);
                assert!(
                    (simulated - expected).abs() < 1e-9,
                    "{} {request:?} {uniform:?}: {simulated} for {expected}",
                    family.name
                );
                compared += 1;
            }
        }
    }
    assert!(compared > 100);
}

#[test]
fn hanayo_waves_shrink_the_bubble() {
    for ranks in [2, 4, 8] {
        for virtual_stages_per_rank in [2, 4, 6] {
            let schedule = build(
                "hanayo",
                &Request { virtual_stages_per_rank: Some(virtual_stages_per_rank), ..Request::new(ranks, ranks) },
            )
            .unwrap();
            let bubble_s = simulated_bubble_s(&schedule, EQUAL);
            assert!(bubble_s <= 1.5 * 3.0 * f64::from(ranks - 1), "{ranks} {virtual_stages_per_rank}: {bubble_s}");
        }
    }
}

#[test]
fn zb_leaves_only_the_fill_when_memory_allows() {
    for (ranks, micro_batches) in [(1, 3), (2, 4), (4, 8), (6, 30), (8, 16)] {
        let schedule = build("zb", &Request::new(ranks, micro_batches)).unwrap();
        assert!((simulated_bubble_s(&schedule, EQUAL) - f64::from(ranks - 1)).abs() < 1e-9, "{ranks} {micro_batches}");
    }
}

#[test]
fn one_unit_of_chimera_leaves_p_minus_2_slots() {
    let slots = Uniform { forward_s: 1.0, input_gradient_s: 0.5, weight_gradient_s: 0.5, overlapped_s: 2.0 };
    for ranks in [2, 4, 8, 16] {
        let schedule = build("chimera", &Request::new(ranks, ranks)).unwrap();
        assert!((simulated_bubble_s(&schedule, slots) - f64::from(ranks - 2)).abs() < 1e-9, "{ranks}");
    }
}

proptest! {
    #[test]
    fn the_cap_of_zb_and_of_hanayo_holds(ranks in 1_u32..7, micro_batches in 1_u32..20, activation_limit in 2_u32..20) {
        let request = Request { activation_limit: Some(activation_limit), ..Request::new(ranks, micro_batches) };
        for name in ["zb", "hanayo"] {
            let schedule = build(name, &request).unwrap();
            prop_assert_eq!(schedule.validate(), Ok(()));
            prop_assert!(schedule.peak_in_flight().into_iter().all(|held| held <= activation_limit), "{}", name);
        }
    }

    #[test]
    fn v_half_and_v_min_keep_their_memory(ranks in 1_u32..10, micro_batches in 1_u32..30) {
        for (name, activation_limit) in [("v_half", 2 * (ranks / 2 + 1)), ("v_min", 2 * ((ranks + 4) / 3))] {
            let schedule = build(name, &Request::new(ranks, micro_batches)).unwrap();
            prop_assert!(schedule.peak_in_flight().into_iter().all(|held| held <= activation_limit), "{}", name);
        }
    }

    #[test]
    fn any_durations_give_a_valid_order(
        stages in prop::collection::vec((0.0..9.0, 0.0..9.0, 0.0..9.0), 1..6), transfer_s in 0.0..3.0,
        micro_batches in 1_u32..16, activation_limit in 1_u32..12,
    ) {
        let list = |of: fn(&(f64, f64, f64)) -> f64| stages.iter().map(of).collect::<Vec<f64>>();
        let durations = Durations {
            forward_s: list(|x| x.0), input_gradient_s: list(|x| x.1), weight_gradient_s: list(|x| x.2), transfer_s,
        };
        let ranks = u32::try_from(stages.len()).unwrap();
        let request = Request { activation_limit: Some(activation_limit), durations: Some(durations.clone()), ..Request::new(ranks, micro_batches) };
        let schedule = build("zb", &request).unwrap();
        prop_assert_eq!(schedule.validate(), Ok(()));
        prop_assert!(schedule.peak_in_flight().into_iter().all(|held| held <= activation_limit));
        let twice = |list: &[f64]| list.iter().chain(list).copied().collect::<Vec<f64>>();
        let folded = Durations {
            forward_s: twice(&durations.forward_s),
            input_gradient_s: twice(&durations.input_gradient_s),
            weight_gradient_s: twice(&durations.weight_gradient_s),
            transfer_s,
        };
        for name in ["zb_v", "v_half", "v_min"] {
            let request = Request { durations: Some(folded.clone()), ..Request::new(ranks, micro_batches) };
            prop_assert_eq!(build(name, &request).unwrap().validate(), Ok(()));
        }
    }

    #[test]
    fn a_window_is_the_number_of_activations_held(windows in prop::collection::vec(1_u32..9, 1..9), more in 0_u32..9) {
        let micro_batches = windows.iter().max().unwrap() + more;
        let schedule = one_f_one_b(&windows, micro_batches);
        prop_assert_eq!(schedule.peak_in_flight(), windows);
    }

    #[test]
    fn every_family_can_be_run((family, request) in any_request()) {
        let schedule = family.build(&request).unwrap();
        prop_assert_eq!(schedule.validate(), Ok(()));
        prop_assert_eq!(schedule.ranks(), request.ranks);
        prop_assert_eq!(schedule.total_micro_batches(), request.micro_batches);
        prop_assert_eq!(schedule.action_lists.iter().flatten().any(|action| action.kind == Kind::WeightGradient), family.splits_backward);
    }

    #[test]
    fn no_rank_holds_more_than_the_closed_form((family, request) in any_request()) {
        let sizes = family.sizes(&request).unwrap();
        let schedule = family.build(&request).unwrap();
        for (rank, held) in (0..).zip(schedule.peak_in_flight()) {
            if let Some(peak) = family.peak_in_flight(sizes, rank) {
                prop_assert!(held <= peak, "{} of {} on rank {} of {:?}", held, peak, rank, request);
                // With few micro-batches some ranks never fill up.
                prop_assert!(held == peak || sizes.micro_batches < 2 * sizes.ranks);
            }
        }
    }

    #[test]
    fn text_goes_out_and_in_again((family, request) in any_request()) {
        // Text says nothing of synchronization and versions.
        let built = family.build(&request).unwrap();
        let schedule = Schedule { synchronization: Synchronization::Flush, weight_versions: vec![1; built.action_lists.len()], ..built };
        let read = Schedule::from_text(family.name, &schedule.to_text()).unwrap();
        prop_assert_eq!(&read, &schedule);
        prop_assert_eq!(&Schedule::from_text(family.name, &schedule.to_text_in_steps().unwrap()).unwrap(), &schedule);
    }

    #[test]
    fn two_actions_of_a_rank_swapped_are_reported_or_harmless(
        (family, request) in any_request(), rank in any::<prop::sample::Index>(), at in any::<prop::sample::Index>(),
    ) {
        let mut schedule = family.build(&request).unwrap();
        let order = &mut schedule.action_lists[rank.index(request.ranks as usize)];
        if order.len() > 1 {
            let at = at.index(order.len() - 1);
            order.swap(at, at + 1);
        }
        let costs = uniform_costs(&schedule, EQUAL);
        if schedule.validate().is_ok() {
            prop_assert!(Sweep::default().step_s(&schedule, &costs, Links::Free).is_ok());
        }
    }

    #[test]
    fn an_action_left_out_or_doubled_is_reported((family, request) in any_request(), at in any::<prop::sample::Index>()) {
        let schedule = family.build(&request).unwrap();
        let order = &schedule.action_lists[0];
        let at = at.index(order.len());
        let (mut shorter, mut longer) = (schedule.clone(), schedule.clone());
        shorter.action_lists[0].remove(at);
        // A single forward without its backward is a schedule too.
        prop_assert!(shorter.validate().is_err() || schedule.action_count() == 2);
        longer.action_lists[0].push(order[at]);
        prop_assert!(longer.validate().unwrap_err().to_string().contains("a second time"));
    }

    #[test]
    fn any_text_is_read_or_refused(lines in "[0-3FBIW,;()\n ]{0,60}") {
        let _ = Schedule::from_text("random", &lines);
    }
}

#[test]
fn the_first_wrong_action_is_named() {
    let cases = [
        ("0F0,0B0\n1F0,1B0,0F1", "stage 0 is on rank 0 and on rank 1, which runs `0F1`"),
        ("0F0,0B0,0F0\n1F0,1B0", "rank 0 runs `0F0` a second time"),
        ("0B0,0F0\n1F0,1B0", "rank 0 runs `0B0` before `0F0`"),
        ("0F0,0W0,0I0\n1F0,1B0", "rank 0 runs `0W0` before `0I0`"),
        ("0F0,0B0\n1F0", "`1B0` is missing on rank 1"),
        ("0F0,0I0\n1F0,1B0", "`0W0` is missing on rank 0"),
        ("0F0,0B0,,0F2,0B2\n1F0,1B0,1F2,1B2", "`0F1` is missing on rank 0"),
        ("0F0,0X0", "line 1: `0X0` is not an action"),
        ("0F4000000000,0B4000000000", "4000000001 forwards are due, but there are only 2 actions"),
        ("4000000000F0", "1 action(s) name 4000000001 stages"),
        ("", "0 action(s) name 0 stages"),
        ("(0F0;0B0)OVERLAP_F_B", "rank 0 runs `(0F0;0B0)OVERLAP_F_B` before `0F0`"),
    ];
    for (text, message) in cases {
        assert_eq!(Schedule::from_text("wrong", text).unwrap_err().to_string(), message);
    }
}

#[test]
fn a_deadlock_is_the_cycle_of_those_that_wait() {
    let text = "0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1\n2F0 2B0 2F1 2B1";
    let message = Schedule::from_text("stuck", text).unwrap_err().to_string();
    assert_eq!(
        message,
        "deadlock: rank 0 waits before `0B0` for `1B0`, which rank 1 runs after `1F1`; \
         rank 1 waits before `1F1` for `0F1`, which rank 0 runs after `0B0`"
    );
}

#[test]
fn near_names_are_those_of_the_table() {
    for row in FAMILIES {
        assert_eq!(family(row.name).unwrap().name, row.name);
        assert!(!row.summary.is_empty() && !row.source.is_empty() && !row.peak.is_empty());
    }
}
