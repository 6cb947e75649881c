"""Problems that people reported of programs of this kind, with the tests that show the right
behaviour here."""

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
TABLES = "field/test_tables_and_folders.py"
MACHINES = "field/test_machines.py"
DEPTH = "data/test_depth.py"
OWN_MODELS = "explanation/capture/test_hand_written.py"
FAMILIES = "explanation/test_families.py"
MODELS = "explanation/capture/test_models.py"
NO_ATTENTION = "explanation/test_without_attention.py"

# report → what is right, and the tests that show it ("file::test" or "file::Class::test")
REPORTS: dict[str, tuple[str, list[str]]] = {
    "F01": (
        "A table of ids without suffixes finds its images in the folders beside it.",
        [
            f"{TABLES}::test_no_table_of_the_corpus_gives_an_image_a_wrong_label",
            f"{TABLES}::test_ids_that_name_two_files_are_refused",
        ],
    ),
    "F02": (
        "Columns of usual names are found; others are named by an option, for which a message asks.",
        [
            f"{TABLES}::test_no_table_of_the_corpus_gives_an_image_a_wrong_label",
            f"{TABLES}::test_columns_are_named_by_the_user",
        ],
    ),
    "F03": (
        "Semicolons and tabs between columns are recognised.",
        [
            f"{TABLES}::test_no_table_of_the_corpus_gives_an_image_a_wrong_label",
        ],
    ),
    "F04": (
        "Tables of Windows are read: marks, line ends, backslashes, capitals, Windows-1252.",
        [
            f"{TABLES}::test_no_table_of_the_corpus_gives_an_image_a_wrong_label",
        ],
    ),
    "F05": (
        "Blank lines at the end of a table are left out.",
        [
            f"{TABLES}::test_no_table_of_the_corpus_gives_an_image_a_wrong_label",
        ],
    ),
    "F06": (
        "Columns of zeros and ones are labels where the user names them.",
        [
            f"{TABLES}::test_several_labels_are_read_where_the_user_says_so",
        ],
    ),
    "F09": (
        "A test split with fewer classes is matched by name.",
        [f"{TABLES}::test_a_split_of_fewer_classes_is_matched_by_name"],
    ),
    "F10": (
        "Suffixes in large letters are images.",
        [f"{TABLES}::test_photos_with_large_suffixes_and_names_of_any_language_are_found"],
    ),
    "F11": (
        "Folders that systems make are no classes.",
        [f"{TABLES}::test_folders_of_systems_are_left_out_with_a_count"],
    ),
    "F13": (
        "Folders named like splits are no classes.",
        [
            f"{TABLES}::test_folders_that_are_no_classes_are_refused_in_a_sentence",
        ],
    ),
    "F14": (
        "Classes in the names of files are read by --label-by, for which a message asks.",
        [
            f"{TABLES}::test_label_by_says_what_it_leaves_out",
            f"{TABLES}::test_folders_that_are_no_classes_are_refused_in_a_sentence",
        ],
    ),
    "F15": (
        "A column of splits is used where the user names it.",
        [
            f"{TABLES}::test_columns_are_named_by_the_user",
        ],
    ),
    "F16": (
        "Whole-number classes are ordered as numbers, and an index means the same everywhere.",
        [
            f"{TABLES}::test_whole_numbers_are_ordered_as_numbers",
            f"{TABLES}::test_a_name_that_looks_like_an_index_is_told_apart",
        ],
    ),
    "F17": (
        "Integer labels with gaps, or that don't begin at 0, are refused.",
        [f"{TABLES}::test_labels_from_python_count_the_classes"],
    ),
    "F20": (
        "An image that is listed with two classes is refused, or has several labels.",
        [
            f"{TABLES}::test_every_wrong_row_is_named_by_its_line_ten_at_most",
            f"{TABLES}::test_several_labels_are_read_where_the_user_says_so",
        ],
    ),
    "F21": (
        "10 to 16 bits are scaled by the range of the training images, kept in the model file.",
        [
            f"{DEPTH}::test_twelve_bits_fill_the_range_wherever_they_are_in_sixteen",
            f"{DEPTH}::test_transparency_of_sixteen_bits_keeps_the_values",
            "training/test_depth.py::test_a_copy_of_twelve_bits_trains_to_the_same_weights",
        ],
    ),
    "F22": (
        "All of 16 bits are scaled, not clipped to white.",
        [f"{DEPTH}::test_all_of_sixteen_bits_are_scaled_as_without_a_range"],
    ),
    "F25": (
        "Images of four bands and more are refused with their number.",
        [
            f"{DEPTH}::test_bands_that_are_no_colours_are_refused",
            "training/test_user_objects.py::test_what_is_no_data_set_is_one_sentence",
        ],
    ),
    "F26": (
        "Photos are upright by their EXIF tag, in every format and in serving.",
        [
            "data/test_images.py::test_exif_rotation_is_applied",
            "deploy/serve/test_serve.py::test_upright_pixels_count_and_no_name_of_a_file_is_opened",
        ],
    ),
    "F28": (
        "Files that are cut short are named and skipped.",
        [
            "data/test_images.py::test_a_file_cut_short_anywhere_is_refused_by_name",
            "data/test_loader.py::test_an_unreadable_image_is_named_once_and_the_next_takes_its_place",
        ],
    ),
    "F29": (
        "Stereo photos and wrong suffixes are read; web pages named .jpg are named.",
        [
            "data/test_images.py::test_a_wrong_suffix_and_two_pictures_in_one_file_are_read",
            "data/test_images.py::test_other_files_are_refused_by_name",
            "data/test_images.py::test_jpeg_and_cmyk_jpeg_keep_the_colours",
        ],
    ),
    "F30": (
        "Images beyond the limit of pixels name VIT_MAX_PIXELS.",
        ["runtime/test_memory.py::test_an_image_of_too_many_pixels_is_refused_with_the_way_out"],
    ),
    "F31": (
        "A class without images has no precision, recall and F1.",
        [
            "evaluation/test_metrics.py::"
            "test_per_class_metrics_and_confusion_are_counts_and_their_ratios",
        ],
    ),
    "F33": (
        "An audit works with a class of one image or of one group, which it doesn't judge.",
        [
            "field/test_groups.py::test_an_audit_of_a_class_of_one_image_judges_the_others",
            "field/test_groups.py::test_an_audit_predicts_each_image_without_its_group",
        ],
    ),
    "F34": (
        "Weights of classes change the training loss alone, not the validation's.",
        [
            "training/test_train_step.py::"
            "test_class_weights_multiply_each_samples_loss_whatever_the_micro_batches",
            "training/test_user_objects.py::"
            "test_weights_and_mixed_images_leave_the_validation_loss_alone",
        ],
    ),
    "F35": (
        "Training runs in any thread.",
        [f"{MACHINES}::test_training_in_another_thread_leaves_signals_alone"],
    ),
    "F36": (
        "Training runs on file systems without locks, with one warning.",
        [f"{MACHINES}::TestNoLocks::test_a_run_trains"],
    ),
    "F39": (
        "Prefixes that torch.compile and trainers put before weights are removed.",
        ["model/test_weights.py::TestFiles::test_what_trainers_put_around_the_weights_goes"],
    ),
    "F40": (
        "A run that is killed resumes bit for bit.",
        [
            "training/test_kill.py::test_kill_9_loses_nothing",
            "training/test_resume.py::test_resumed_run_equals_uninterrupted_run",
        ],
    ),
    "F41": (
        "A resumed run goes on with the schedule that was planned, also within minutes.",
        ["training/test_max_minutes.py::test_resumed_run_has_the_length_that_was_decided"],
    ),
    "F42": (
        "A drive that fails for a while is waited for; then the run stops with advice to resume.",
        [f"{MACHINES}::TestDrive::test_training_goes_on_with_the_same_images_or_stops"],
    ),
    "F43": (
        "A batch of odd size names its multiple.",
        [
            "data/test_loader.py::test_mistakes_get_a_sentence",
        ],
    ),
    "F44": (
        "A loss that isn't finite names the step.",
        [
            "training/test_writing.py::"
            "test_a_loss_of_the_user_that_is_nan_stops_with_the_step_and_what_is_kept",
        ],
    ),
    "F45": (
        "Fine-tuning begins at the linear probe and never ends below it.",
        ["training/test_probe.py::test_fine_tuning_goes_on_from_it_and_never_ends_below"],
    ),
    "F46": (
        "The plan says how many parameters Muon updates; kernels are among them.",
        [
            "cli/test_train.py::test_a_dry_run_shows_the_plan_and_a_batch",
            "optim/test_groups.py::"
            "test_muon_takes_hidden_matrices_and_kernels_and_splits_packed_projections_in_three",
        ],
    ),
    "F47": (
        "No batch of one image is left for BatchNorm.",
        ["data/test_loader.py::test_an_epoch_shows_every_sample_once_with_its_own_label"],
    ),
    "F48": (
        "Arrays, data sets and lists of pairs are taken from Python.",
        [
            "training/test_user_objects.py::"
            "test_arrays_and_data_sets_of_the_same_images_train_the_same_model",
        ],
    ),
    "F49": (
        "Models written with torch's own encoder or attention are read.",
        [
            f"{OWN_MODELS}::test_attention_maps_are_those_of_the_products_in_float64",
            f"{OWN_MODELS}::test_an_encoder_that_adds_is_read_as_the_same_blocks_are",
        ],
    ),
    "F50": (
        "Attention that is followed by its addition outside of modules is read.",
        [
            f"{OWN_MODELS}::test_an_encoder_that_adds_is_read_as_the_same_blocks_are",
            "explanation/capture/test_sequence_first.py::test_maps_are_those_of_the_written_out_model",
        ],
    ),
    "F52": (
        "A refusal names the methods that the model has.",
        [f"{NO_ATTENTION}::test_methods_of_attention_are_refused_with_those_that_work"],
    ),
    "F53": (
        "A module is explained with the names of its classes and its preprocessing.",
        [f"{OWN_MODELS}::test_a_model_of_ones_own_is_explained_by_one_call"],
    ),
    "F54": (
        "Models of hierarchical families have a map.",
        [f"{FAMILIES}::test_maps_are_those_worked_out_by_hand"],
    ),
    "F55": (
        "Models whose last stage sees the whole image are not called mirrored.",
        [
            f"{FAMILIES}::test_maps_are_those_worked_out_by_hand",
            f"{NO_ATTENTION}::test_tokens_that_see_the_whole_image_are_no_feature_map",
        ],
    ),
    "F56": (
        "Hugging Face's hierarchical models have a map.",
        [f"{FAMILIES}::test_maps_are_those_worked_out_by_hand"],
    ),
    "F57": (
        "A subclass of timm's model that pools by itself is read as it pools.",
        [f"{OWN_MODELS}::test_maes_own_pooling_is_read"],
    ),
    "F58": (
        "Keys and values that several heads share are read.",
        [f"{OWN_MODELS}::test_grouped_queries_of_timm_are_read"],
    ),
    "F61": (
        "Images that aren't square are trained on, also from weights of a square.",
        ["model/test_timm_weights.py::test_ours_equals_timm_at_native_other_and_non_square_size"],
    ),
    "F62": (
        "Maps don't depend on the mode of gradients of the caller.",
        [f"{MODELS}::test_checkpointing_and_inference_mode_change_no_map"],
    ),
    "F63": (
        "A quantised model answers, and its maps are refused in a sentence.",
        [f"{MODELS}::test_a_quantised_model_answers_and_its_maps_are_refused"],
    ),
    "F64": (
        "timm's models in Hugging Face's wrapper are read.",
        [f"{MODELS}::test_timms_model_in_hugging_faces_wrapper_has_its_maps"],
    ),
    "F66": (
        "Shards without .cls name the label that an image lacks.",
        ["data/sources/test_shards.py::test_damaged_shards_are_refused"],
    ),
    "F67": (
        "An ONNX file takes any number of images.",
        ["deploy/export/test_onnx.py::test_any_number_of_images_gives_the_rollout_of_each"],
    ),
    "F68": (
        "The plan says what the crop of wide pictures leaves out.",
        [
            "training/test_depth.py::test_the_plan_says_how_much_is_cut",
        ],
    ),
    "F69": (
        "The page of vit serve works below any path and under names that are allowed.",
        [
            "deploy/serve/test_serve.py::test_pages_are_refused_to_other_hosts_and_answers_are_not_guessed_at"
        ],
    ),
    "F70": (
        "Photos unlike the training's have small p-values.",
        [
            "prediction/test_conformal.py::"
            "test_p_values_of_like_images_are_uniform_and_of_unlike_ones_small"
        ],
    ),
    "F71": (
        "Names of any language are read.",
        [f"{TABLES}::test_photos_with_large_suffixes_and_names_of_any_language_are_found"],
    ),
    "F72": (
        "Commands run without what only Linux has.",
        ["field/test_systems.py::test_commands_run_without_what_only_linux_has"],
    ),
}


@cache
def list_tests(file: str) -> set[str]:
    """List the tests of a file: "test" or "Class::test"."""
    names: set[str] = set()
    for node in ast.parse((TESTS / file).read_text()).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            methods = (each.name for each in node.body if isinstance(each, ast.FunctionDef))
            names.update(f"{node.name}::{name}" for name in methods)
    return names


@pytest.mark.parametrize("report", REPORTS)
def test_each_report_has_tests(report: str) -> None:
    behaviour, tests = REPORTS[report]
    assert behaviour.endswith(".")
    assert tests
    for test in tests:
        file, _, name = test.partition("::")
        assert name in list_tests(file), test
