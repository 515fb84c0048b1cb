from tests.oracle import model as model  # a fixture
