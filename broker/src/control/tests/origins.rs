//! Topics that sends created, as brokers of a cluster follow each other with them.

use super::*;
use crate::namesrv::offer::CREATED_ATTRIBUTE;

fn send_fields(topic: &str) -> [(&str, &str); 12] {
    [
        ("a", "p"),
        ("b", topic),
        ("c", "TBW102"),
        ("d", "4"),
        ("e", "0"),
        ("f", "0"),
        ("g", "1"),
        ("h", "0"),
        ("i", ""),
        ("j", "0"),
        ("k", "false"),
        ("m", "false"),
    ]
}

impl Harness {
    fn created_by_send(&mut self, topic: &str) {
        let request = self.pending(request::SEND_MESSAGE_V2, &send_fields(topic));
        self.effects.clear();
        self.control
            .create_topic_for_send(self.now_ms, request, &mut self.effects);
        assert!(self.control.topics.has(topic));
    }

    fn offer(&mut self, text: &str) {
        self.effects.clear();
        self.control
            .take_offers(self.now_ms, text, &mut self.effects);
    }

    fn delete(&mut self, topic: &str) {
        let reply = self.ask(request::DELETE_TOPIC_IN_BROKER, &[("topic", topic)], "");
        assert_eq!(reply.code, 0, "{}", reply.remark);
    }

    fn mark(&self, topic: &str) -> Option<String> {
        let topics = self.control.registration_topics();
        topics
            .get(topic)?
            .attributes
            .get(CREATED_ATTRIBUTE)
            .cloned()
    }

    fn saved(&self, wanted: &str) -> Option<Vec<u8>> {
        self.effects.iter().rev().find_map(|effect| match effect {
            Effect::Save { name, bytes } if *name == wanted => Some(bytes.clone()),
            _ => None,
        })
    }

    fn registered(&self) -> Vec<String> {
        let registered = self.effects.iter().filter_map(|effect| match effect {
            Effect::Register { topics } => Some(topics.clone()),
            _ => None,
        });
        registered.flatten().collect()
    }
}

#[test]
fn a_topic_made_by_a_send_is_told_as_such_and_shown_as_any_other() {
    let mut harness = Harness::new();
    harness.created_by_send("T");
    harness.create_topic("by_hand", 4);
    assert_eq!(harness.mark("T"), Some(NOW.to_string()));
    assert_eq!(harness.mark("by_hand"), None);
    assert_eq!(harness.mark("TBW102"), None);
    let config = harness.ask(request::GET_TOPIC_CONFIG, &[("topic", "T")], "");
    assert!(
        config.text().contains("\"attributes\":{}"),
        "{}",
        config.text()
    );
    assert!(config.text().contains("\"topicSysFlag\":0"));
    assert!(
        !harness
            .ask(request::GET_ALL_TOPIC_CONFIG, &[], "")
            .text()
            .contains("pinion")
    );
}

#[test]
fn an_offered_topic_is_created_saved_told_to_the_cores_and_registered() {
    let mut harness = Harness::new();
    harness.offer("T 4 3 0 123,U 2 2 0 124");
    let names: Vec<&str> = harness
        .effects
        .iter()
        .map(|effect| match effect {
            Effect::Save { name, .. } => name,
            Effect::TopicChanged(topic) => topic.config.topic_name.as_str(),
            Effect::Register { .. } => "register",
            _ => "other",
        })
        .collect();
    assert_eq!(
        names,
        ["placement.json", "topics.json", "T", "U", "register"]
    );
    assert_eq!(harness.registered(), ["T", "U"]);
    let config = &harness.control.topics.get("T").unwrap().config;
    assert_eq!(
        (config.read_queue_nums, config.write_queue_nums, config.perm),
        (4, 3, 6)
    );
    assert_eq!(
        harness.mark("T").unwrap(),
        "123",
        "so that it can be offered on"
    );
    harness.offer("T 4 3 0 123");
    assert!(harness.effects.is_empty(), "once is enough");
}

#[test]
fn offers_of_reserved_malformed_or_present_names_and_impossible_counts_are_not_taken() {
    let mut harness = Harness::new();
    harness.create_topic("mine", 2);
    let before = harness.control.counters().topics;
    harness.offer(
        "mine 9 9 0 5,TBW102 9 9 0 5,%RETRY%g 1 1 0 5,%DLQ%g 1 1 0 5,rmq_sys_x 1 1 0 5,\
         a/b 1 1 0 5,big 99999 1 0 5,none 0 0 0 5,SCHEDULE_TOPIC_XXXX 1 1 0 5",
    );
    assert!(harness.effects.is_empty(), "{:?}", harness.effects);
    assert_eq!(harness.control.counters().topics, before);
}

#[test]
fn without_automatic_creation_no_offer_is_taken() {
    let mut config = config();
    config.keys.auto_create_topic = false;
    let mut harness = Harness::with(config);
    assert!(!harness.control.takes_offers());
    harness.offer("T 4 4 0 123");
    assert!(!harness.control.topics.has("T"));
}

#[test]
fn a_deleted_topic_does_not_come_back_by_an_offer_made_before() {
    let mut harness = Harness::new();
    harness.created_by_send("T");
    harness.now_ms += 10;
    harness.delete("T");
    assert_eq!(harness.registered(), ["T"], "the name server hears of it");
    let (part, gone) = harness.control.registration_part(&["T".to_owned()].into());
    assert!(part.is_empty());
    assert_eq!(gone, ["T"]);
    harness.offer(&format!("T 4 4 0 {NOW}"));
    assert!(!harness.control.topics.has("T"));
    harness.offer(&format!("T 4 4 0 {}", NOW + 11));
    assert!(
        harness.control.topics.has("T"),
        "somebody sent to it again, on another broker"
    );
}

#[test]
fn deleting_a_topic_that_is_not_here_yet_refuses_the_offer_under_way_even_after_a_restart() {
    let mut harness = Harness::new();
    harness.now_ms += 10;
    harness.delete("T");
    let saved = SavedTables {
        placement: harness.saved("placement.json"),
        topics: harness.saved("topics.json"),
        ..SavedTables::default()
    };
    let (control, _) = Control::new(setup(config(), saved)).unwrap();
    let mut again = Harness {
        control,
        now_ms: NOW + 20,
        effects: Vec::new(),
    };
    again.offer(&format!("T 4 4 0 {NOW}"));
    assert!(!again.control.topics.has("T"));
    again.created_by_send("T");
    again.offer(&format!("T 4 4 0 {NOW}"));
    assert_eq!(again.mark("T"), Some((NOW + 20).to_string()));
}

#[test]
fn marks_survive_a_restart_and_end_when_an_administrator_changes_the_topic() {
    let mut harness = Harness::new();
    harness.created_by_send("T");
    let saved = SavedTables {
        placement: harness.saved("placement.json"),
        topics: harness.saved("topics.json"),
        ..SavedTables::default()
    };
    let (control, _) = Control::new(setup(config(), saved)).unwrap();
    let mut again = Harness {
        control,
        now_ms: NOW,
        effects: Vec::new(),
    };
    assert_eq!(again.mark("T"), Some(NOW.to_string()));
    again.create_topic("T", 4);
    assert_eq!(again.mark("T"), None, "even with the settings it had");
    assert!(again.registered().contains(&"T".to_owned()));
    let placement = String::from_utf8(again.saved("placement.json").unwrap()).unwrap();
    assert!(placement.contains("\"createdBySend\":{}"), "{placement}");
}

#[test]
fn a_version_told_before_is_not_told_again_with_a_change() {
    let mut harness = Harness::new();
    harness.create_topic("T", 1);
    let told = harness.control.topics_version();
    harness.control.renew_version(NOW + 5, Some(told));
    let renewed = harness.control.topics_version();
    assert!(renewed > told);
    harness.control.renew_version(NOW + 6, Some(told));
    assert_eq!(harness.control.topics_version(), renewed);
}
